"""What a person gets who types something wrong: one line that names it, exit code 2, and nothing is lost."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from polar_gym import durable
from polar_gym.cli import main
from polar_gym.config.loading import load_config
from polar_gym.console import make_console
from polar_gym.engines import http
from polar_gym.errors import ConfigError, how_to_install
from polar_gym.gateway.node.settings import GatewaySettings
from polar_gym.paths import check_writable
from polar_gym.service.settings import ServeSettings
from tests.support.episodes import make_episode
from tests.support.processes import free_port, running
from tests.support.requirements import need_bubblewrap


def said(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


@pytest.mark.parametrize("command", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file or directory"),
        ("", "it holds no episode"),
        ("not json\n", ":1: not JSON"),
        ("{}\n", ":1: not an episode of this version: session: is required"),
    ],
)
def test_a_file_that_holds_no_episodes_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: str | None, says: str
) -> None:
    file = tmp_path / "episodes.jsonl"
    if content is not None:
        file.write_text(content)
    assert f"{file}" in (message := said([command, str(file)], capsys))
    assert says in message


def test_a_file_that_holds_no_episodes_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(content := '{"instance_id": "a"}\n{"instance_id"')
    message = said(["rollout", "demo", "--resume", str(file)], capsys)
    assert f"{file}:1: not an episode of this version: session: is required" in message
    assert file.read_text() == content


@pytest.mark.parametrize("content", [None, "", "a note without an end"])
def test_a_file_that_no_run_wrote_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    """Guards against a note that is cut off as a torn line, and against a whole new run where one should go on."""
    file = tmp_path / "notes.txt"
    if content is not None:
        file.write_text(content)
    message = said(arguments := ["rollout", "demo", "--resume", str(file)], capsys)
    assert message == f"error: --resume={str(file)!r}: no run has written this file; begin one without --resume\n"
    assert (file.read_text() if file.exists() else None) == content
    assert [*tmp_path.iterdir()] == [file] * file.exists()
    (tmp_path / "other").mkdir()  # the state of no run, or of another one
    assert "no run has written this file" in said([*arguments, f"rollout.state={tmp_path}/other"], capsys)
    assert (file.read_text() if file.exists() else None) == content


def test_a_directory_is_not_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = said(["rollout", "demo", "--resume", str(tmp_path)], capsys)
    assert message == f"error: --resume={str(tmp_path)!r}: Is a directory; name the file of a run\n"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["rollout", "demo", "rollout.output="], "rollout.output"),
        (["rollout", "demo", "rollout.state="], "rollout.state"),
        (["gateway", "engine=embedded", "state="], "state"),
        (["serve", "state="], "state"),
    ],
)
def test_an_empty_path_is_not_the_working_directory(
    capsys: pytest.CaptureFixture[str], arguments: list[str], key: str
) -> None:
    assert said(arguments, capsys).startswith(f"error: {key}='': is empty; name a path")


def test_tasks_of_an_image_are_refused_where_there_are_no_images(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a sandbox, a harness and an error for each session."""
    need_bubblewrap()
    message = said(["rollout", "demo", "runtime=bubblewrap", "runtime.image=foo", "tasks.limit=1"], capsys)
    assert message == (
        "error: runtime.image='foo': bubblewrap runs no images; set runtime=docker or runtime=apptainer\n"
    )


def test_a_scratch_directory_that_is_missing_is_named_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_bubblewrap()
    own = ["runtime=bubblewrap", f"runtime.scratch={tmp_path}/missing", f"rollout.output={tmp_path}/e.jsonl"]
    message = said(["rollout", "demo", *own, "tasks.limit=1"], capsys)
    assert f"runtime.scratch='{tmp_path}/missing': there is no such directory" in message


def test_a_lack_that_may_pass_has_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a service that is never started again after a full disk, or an engine that loads for long."""
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(http, "START_PATIENCE_SECONDS", 0.1)
    engine = ["engine=vllm", f"engine.url=http://{address}", "engine_wait_seconds=0", "listen=127.0.0.1:0"]
    assert said(["gateway", *engine, f"state={tmp_path}/node"], capsys, 75).startswith("engine: ")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"listen=127.0.0.1:{taken.getsockname()[1]}"
        assert "Address already in use" in said(["serve", listen, f"state={tmp_path}/state"], capsys, 75)
    with durable.locked(tmp_path / "lock"):
        message = said(["serve", "listen=127.0.0.1:0", f"state={tmp_path}"], capsys, 75)
    assert "in use by another rollout server" in message
    assert "No such file" in said(["serve", "listen=127.0.0.1:0", "state=/proc/nowhere"], capsys)


def test_what_was_typed_is_shown_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against brackets that are taken for markup, which loses them or raises."""
    assert "[/red]" in said(["rollout", "tasks=jsonl", "tasks.path='[/red]'"], capsys)


def test_an_output_that_cannot_be_written_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"rollout.output='{tmp_path}': Is a directory" in said(["rollout", f"rollout.output={tmp_path}"], capsys)


def test_a_run_that_cannot_start_leaves_earlier_episodes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against opening the output, and emptying it, before the engine answers."""
    output = tmp_path / "episodes.jsonl"
    output.write_text("precious\n")
    (tmp_path / "model").mkdir()
    engine = ["engine.policy=transformers", f"engine.model_path={tmp_path / 'model'}"]
    assert said(["rollout", *engine, f"rollout.output={output}"], capsys).startswith("engine: ")
    assert output.read_text() == "precious\n"


def test_a_task_that_cannot_be_graded_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    message = said(["rollout", "evaluator.log_parser=nope"], capsys)
    assert re.match(r"error: task \S+: evaluator\.log_parser='nope': ", message)


def test_a_missing_key_is_named_by_its_whole_name() -> None:
    with pytest.raises(ConfigError, match=r"^engine\.url: is required$"):
        load_config(None, ["engine=vllm"])


def test_an_unknown_key_of_a_group_names_every_key_that_the_group_has() -> None:
    with pytest.raises(ConfigError, match=r"harness\.profil='lean': unknown key; known here: .*profile"):
        load_config(None, ["harness.profil=lean"])


def test_a_value_of_no_type_that_its_key_may_have_is_named_by_the_key() -> None:
    with pytest.raises(
        ConfigError, match=r"^harness\.command=True: .* valid string\nharness\.command=True: .* valid list$"
    ):
        load_config(None, ["harness=command", "harness.command=true"])


def test_settings_are_meant_as_they_stand() -> None:
    """Guards against shell commands whose `${VARIABLE}` is taken for an interpolation."""
    scripts = [{"commands": ["echo ${HOME}"], "final_message": "x"}]
    config = load_config(settings={"engine": {"name": "embedded", "scripts": scripts}})
    assert config.engine.options["scripts"] == scripts


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "demo", "--output"],
        ["watch", "some-task", "--output"],
        ["tasks", "prepare", "rows.jsonl", "--out"],
        ["tasks", "from-pypi", "sqlparse", "0.5.1", "0.5.2", "--out"],
    ],
)
def test_a_file_that_cannot_be_written_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    """Guards against tasks that are submitted, or made for minutes, before the end of it is a traceback."""
    if "from-pypi" in arguments:
        pytest.importorskip("pypi_simple", reason=how_to_install("swe"))
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "out.jsonl"
    assert f"{arguments[-1]}='{inside}': " in (message := said([*arguments, str(inside)], capsys))
    assert "name a file that can be written" in message


def test_a_link_that_cannot_be_made_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory; name a directory" in said(["nemo-link", str(tmp_path / "file")], capsys)


def test_a_check_of_an_output_leaves_nothing(tmp_path: Path) -> None:
    (old := tmp_path / "old").write_text("precious")
    for file in (old, tmp_path / "new" / "file"):
        check_writable("--out", file)
    assert old.read_text() == "precious"
    assert list((tmp_path / "new").iterdir()) == []


def test_a_sweep_over_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "rollout.num_samples=range(0): no value" in said(["rollout", "-m", "rollout.num_samples=range(0)"], capsys)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["-m", "harness=codex,pi", "--resume", "FILE"], "--resume='FILE': goes on with one run; leave --multirun out"),
        (["--cfg", "job", "--resume", "FILE"], "--resume='FILE': has no effect with --cfg, which runs nothing"),
        (["--resolve"], "--resolve: shows values in the composed config; add --cfg job, or leave it out"),
    ],
)
def test_options_of_a_rollout_that_exclude_or_need_each_other(
    capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    """Guards against a whole new sweep where a run was to go on."""
    assert says in said(["rollout", "nope", *options], capsys)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["doctor", "--sandbox", "--engine-url", "http://x"], "--engine-url='http://x': has no effect with --sandbox"),
        (["view", "FILE", "--out", "page.html", "--port", "80"], "--port=80: has no effect with --out"),
        (["status", "TASK", "--limit", "3"], "--limit=3: has no effect on one task"),
    ],
)
def test_an_option_without_effect_is_refused(capsys: pytest.CaptureFixture[str], command: list[str], says: str) -> None:
    assert says in said(command, capsys)


@pytest.mark.parametrize("server", ["nonsense", "ftp://there", "http://"])
def test_a_server_that_is_no_url_is_named(capsys: pytest.CaptureFixture[str], server: str) -> None:
    assert f"--server='{server}': expected a URL" in said(["status", "--server", server], capsys)


@pytest.mark.parametrize("arguments", [["tasks", "validate"], ["tasks", "prepare", "--out", "never.jsonl"]])
def test_a_file_without_tasks_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    (empty := tmp_path / "empty.jsonl").write_text("\n")
    assert f"{empty}: it holds no " in said([*arguments, str(empty)], capsys)
    assert not Path("never.jsonl").exists()


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_an_import_that_no_request_can_name_is_refused(capsys: pytest.CaptureFixture[str], command: str) -> None:
    message = said([command, "imports=mine.agent:run,mine"], capsys)
    assert "imports" in message
    assert "'mine': expected package.module:attribute or path/to/file.py:function" in message


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_a_directory_that_is_not_there_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    """Guards against a mistyped name that shows when the first request is refused."""
    own = [f"directories={tmp_path},{tmp_path / 'typo'}", f"state={tmp_path / 'state'}", "listen=127.0.0.1:0"]
    message = said([command, "engine=embedded", *own], capsys)
    assert f"directories={tmp_path / 'typo'}: is no directory on this machine" in message


@pytest.mark.parametrize("command", ["serve", "gateway"])
@pytest.mark.parametrize("setting", ["listn=127.0.0.1:0", "keep_byte=3"])
def test_a_mistyped_setting_of_a_service_names_its_own(
    capsys: pytest.CaptureFixture[str], command: str, setting: str
) -> None:
    """Guards against the keys of a run alone, which the service's own are not among."""
    message = said([command, setting], capsys)
    assert message.startswith(f"error: {setting}: unknown setting; ")
    assert "keep_bytes" in message.partition("; of a rollout")[0]
    assert "engine, " in message


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("rollout.state=/big/disk", "set state=DIR"),
        ("rollout.num_samples=4", "the requests of a node bring their own"),
        ("budget.max_calls=4", "the requests of a node bring their own"),
        ("sampling={seed: 1}", "the requests of a node bring their own"),
    ],
)
def test_a_setting_that_no_node_has_is_refused(capsys: pytest.CaptureFixture[str], setting: str, instead: str) -> None:
    """Guards against journals on another disk than the one that was named."""
    message = said(["gateway", "engine=embedded", setting], capsys)
    assert message.startswith(f"error: {setting}: has no effect on a node; {instead}")


@pytest.mark.parametrize("command", ["serve", "gateway"])
def test_help_of_a_service_names_every_setting_with_its_default(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    model = ServeSettings if command == "serve" else GatewaySettings
    for name, field in model.model_fields.items():
        default = {"cluster": "local"}.get(name, "null" if field.default is None else field.default)
        assert f"  {name}={default}  (" in shown


def test_a_reader_that_left_does_not_end_the_work() -> None:
    """Guards against `polar-gym rollout | head` ending the sessions that still run."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        console = make_console()
        console.file = file
        for _ in range(2):
            console.print("to nobody")


@pytest.mark.parametrize(
    "command", [["eval", "tasks=bundled"], ["rollout"], ["rollout", "-m", "harness.model_name=a,b"]], ids=" ".join
)
def test_whoever_interrupts_is_told_where_what_was_captured_is(tmp_path: Path, command: list[str]) -> None:
    """Guards against an end without a word."""
    need_bubblewrap()
    number = f"600.{random.getrandbits(32)}"
    waits = ["harness=command", f"harness.command='sleep {number}'", "evaluator=session_completion"]
    here = ["runtime=bubblewrap", "tasks.limit=1", f"runtime.scratch={tmp_path}"]
    here += [f"hydra.sweep.dir={tmp_path}/sweep"] if "-m" in command else []
    with subprocess.Popen(
        [sys.executable, "-c", "from polar_gym.cli import main; main()", *command, *waits, *here],
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not running(f"sleep {number}") and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"^interrupted: ", said, re.MULTILINE), "warnings about this machine may come before it"
    assert "no sandbox is left" in said


ENDS = [
    *("harness=command", "harness.command='sleep 0'", "evaluator=session_completion"),
    *("runtime=bubblewrap", "tasks.limit=1"),
]
"""The settings of a run whose only session ends at once."""


@pytest.mark.parametrize(
    ("output", "fix"),
    [("/dev/full", "name a file"), ("run.jsonl", "go on with `polar-gym rollout` and --resume run.jsonl")],
)
def test_a_full_disk_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output: str, fix: str
) -> None:
    """Guards against a traceback without a word of --resume, where the journals have all calls."""
    need_bubblewrap()
    monkeypatch.chdir(tmp_path)
    Path("run.jsonl").symlink_to("/dev/full")
    message = said(["rollout", *ENDS, f"rollout.output={output}", "rollout.state=state"], capsys, os.EX_TEMPFAIL)
    assert message.startswith(f"error: rollout.output={output}: No space left on device; ")
    assert fix in message


def test_a_full_disk_ends_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against runs that sample for hours what cannot be written, and are then told as not run."""
    need_bubblewrap()
    monkeypatch.chdir(tmp_path)
    Path("9.jsonl").symlink_to("/dev/full")
    output = f"rollout.output={tmp_path}/${{rollout.timeout_seconds}}.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["rollout", "-m", *ENDS, output, "rollout.timeout_seconds=9,8", "hydra.sweep.dir=sweep"])
    assert ended.value.code == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "9.jsonl: No space left on device" in printed
    assert "1 runs are left out" in printed
    assert not Path("8.jsonl").exists()


def test_who_interrupts_before_a_session_began_is_not_told_to_resume_an_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against the episodes of the earlier run, which `--resume` would give for those of this one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.jsonl").write_bytes(make_episode("x", 1.0).to_json() + b"\n")
    monkeypatch.setattr("polar_gym.cli.rollout.roll_out", Mock(side_effect=KeyboardInterrupt))
    message = " ".join(said(["rollout", "demo", "rollout.output=run.jsonl"], capsys, code=130).split())
    assert "interrupted before a session began; no sandbox is left; run.jsonl is that of an earlier run" in message


@pytest.mark.parametrize(
    "setting",
    [
        *("sampling.temperature=0.3", "budget.max_calls=1", "builder=per_request", "harness.profile=lean"),
        *("harness=pi", "runtime=docker", "runtime.image=x", "++rollout.num_samples=2"),
    ],
)
def test_a_branch_takes_no_setting_of_its_episodes(setting: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against branches of another sampling than the command says."""
    message = " ".join(said(["branch", "x.jsonl", "demo", setting], capsys).split())
    assert message.startswith(f"error: {setting}: has no effect on branches")


def test_a_run_that_goes_on_writes_no_other_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against episodes in another file than the one that was named."""
    message = said(["rollout", "demo", "rollout.output=other.jsonl", "--resume", "run.jsonl"], capsys)
    assert message == "error: rollout.output=other.jsonl: --resume goes on with run.jsonl; leave one of them out\n"


def test_no_number_is_no_least_reward(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Guards against a data set that refuses all episodes for ever, with filters that read as the default ones."""
    pytest.importorskip("pyarrow")
    (file := tmp_path / "run.jsonl").write_bytes(make_episode("x", 1.0).to_json() + b"\n")
    message = said(["export", "sft", str(file), "--out", str(tmp_path / "sft"), "--min-reward", "nan"], capsys)
    assert message.startswith("error: min_reward=nan: ")
    assert not (tmp_path / "sft").exists()


PREPARED = {
    "instance_id": "a",
    "problem_statement": "Mend a.",
    "repo": "o/a",
    "workspace": "ws",
    "patch": "p",
    "test_command": "true",
    "log_parser": "pytest",
    "FAIL_TO_PASS": ["t"],
    "PASS_TO_PASS": [],
}


def test_rows_are_prepared_beside_their_workspaces_and_as_json(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Guards against a file of tasks whose workspaces are elsewhere, and JSON under the name of Parquet."""
    (tmp_path / "ws").mkdir()
    (file := tmp_path / "rows.jsonl").write_text(json.dumps(PREPARED) + "\n")
    (tmp_path / "elsewhere").mkdir()
    for out, problem in {"elsewhere/rows.jsonl": "must be beside", "rows.parquet": "rows are written as JSONL"}.items():
        assert problem in said(["tasks", "prepare", str(file), "--out", str(tmp_path / out)], capsys)
        assert not (tmp_path / out).exists()
    file.write_text(json.dumps(PREPARED | {"workspace": str(tmp_path / "ws")}) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "prepare", str(file), "--out", str(tmp_path / "elsewhere" / "rows.jsonl")])
    assert ended.value.code == 0


def test_overrides_that_are_no_text_name_their_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (overrides := tmp_path / "own.yaml").write_bytes(b"o/a: {log_parser: caf\xe9}\n")
    (file := tmp_path / "rows.jsonl").write_text(json.dumps(PREPARED) + "\n")
    command = ["tasks", "prepare", str(file), "--out", str(file), "--overrides", str(overrides)]
    assert f"{overrides}: cannot read the overrides" in said(command, capsys)


@pytest.mark.parametrize("module", ["typer", "pydantic", "polar_gym.cli.rollout", "hydra"])
def test_an_interrupt_while_modules_are_loaded_is_one_line(module: str) -> None:
    """Guards against a traceback in the first second."""
    program = f"""
import os, signal, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from polar_gym.__main__ import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "rollout", "demo", "--cfg", "job"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("command", [["status"], ["watch", "t"], ["cancel", "t"]], ids=" ".join)
def test_a_missing_server_is_named_at_once(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a wait of minutes where no server runs."""
    url = f"http://127.0.0.1:{free_port()}"
    assert said([*command, "--server", url], capsys, os.EX_TEMPFAIL) == (
        f"error: {url}: Connection refused; is `polar-gym serve` running there?\n"
    )


@pytest.mark.parametrize(
    ("setting", "instead"),
    [
        ("engine=vllm", "set it where the nodes start (`polar-gym serve` or `polar-gym gateway`)"),
        ("engine.model=other", "set it where the nodes start"),
        ("proxy.splice=off", "set it where the nodes start"),
        ("++proxy.frozen.kinds=[judge]", "set it where the nodes start"),
        ("scoring.share=null", "set it where the nodes start"),
        ("pools.run=8", "set it where the nodes start"),
        ("rollout.spans=otel", "set it where the nodes start"),
        ("rollout.output=out.jsonl", "give --output FILE"),
        ("rollout.metrics=wandb", "leave it out"),
        ("rollout.state=state", "leave it out"),
        ("hydra.sweep.dir=here", "leave it out"),
    ],
)
def test_a_setting_that_no_request_carries_is_not_submitted(
    capsys: pytest.CaptureFixture[str], setting: str, instead: str
) -> None:
    """Guards against tasks that are sampled in another way than was typed."""
    assert said(["submit", "demo", setting], capsys).startswith(
        f"error: {setting}: has no effect on submitted tasks; {instead}"
    )


def test_a_whole_section_is_not_submitted_where_a_part_has_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(["submit", "demo", "rollout={output: out.jsonl}"], capsys).startswith(
        "error: rollout={output: out.jsonl}: rollout.spans has no effect on submitted tasks; set the others one by one"
    )


def submitted_to_nobody(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what `submit` says before it says that no server answers: its arguments are right."""
    missing = f"http://127.0.0.1:{free_port()}"
    *before, last = said(["submit", *arguments, "--server", missing], capsys, os.EX_TEMPFAIL).splitlines()
    assert "Connection refused" in last
    return before


@pytest.mark.parametrize("recipe", ["demo", "swe_rollout", "sft_data"])
def test_a_recipe_is_submitted_without_an_engine(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    own = ["harness=codex", "sampling.temperature=0.5", "rollout.num_samples=2", "rollout.timeout_seconds=60"]
    assert submitted_to_nobody([recipe, *own], capsys) == []


def test_an_engine_that_a_rollout_requires_is_no_error_of_a_submission(capsys: pytest.CaptureFixture[str]) -> None:
    (warning,) = submitted_to_nobody(["swe_rollout", "harness=pi", "engine.url=http://127.0.0.1:8000"], capsys)
    assert warning.startswith("engine.url=http://127.0.0.1:8000: has no effect on submitted tasks; set it where")


def test_a_recipe_that_is_sampled_as_the_nodes_are_set_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an evaluation "as the model will be served" that is spliced."""
    (warning,) = submitted_to_nobody(["swe_eval"], capsys)
    assert warning.startswith("proxy.splice=off of the recipe swe_eval has no effect on submitted tasks; set it where")


def test_eval_without_arguments_rolls_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give files of episodes" in said(["eval"], capsys)


def test_the_version_is_that_of_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.metadata.version", {"polar-gym": "1.2.3"}.__getitem__)
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "polar-gym 1.2.3\n"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("url", ["foo", "127.0.0.1:8000", "http://"])
def test_an_engine_that_is_no_url_is_named(engine: str, url: str) -> None:
    """Guards against an engine that "broke off its answer" because nobody could be asked."""
    with pytest.raises(ConfigError, match=rf"^engine\.url='{url}': .*expected a URL, e\.g\. http://127"):
        load_config(None, [f"engine={engine}", f"engine.url='{url}'"])


def test_episodes_are_verified_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against journals that are found only from where the rollout ran."""
    need_bubblewrap()
    monkeypatch.chdir(tmp_path)
    run = ["harness=command", "harness.command='true'", "evaluator=session_completion", "runtime=bubblewrap"]
    with pytest.raises(SystemExit):  # with a complaint: the command asked no model
        main(["rollout", *run, "tasks.limit=1", "rollout.output=out/episodes.jsonl"])
    monkeypatch.chdir("/")
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path / "out" / "episodes.jsonl")])
    assert ended.value.code == 0
    assert "exact: 0 of 0 traces" in capsys.readouterr().out


def test_a_directory_without_tasks_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a traceback where `tasks validate` finds no task directory."""
    assert f"tasks.path='{tmp_path}' holds no task directory" in said(["tasks", "validate", str(tmp_path)], capsys)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "task.toml").write_text("[")
    with pytest.raises(SystemExit) as ended:
        main(["tasks", "validate", str(tmp_path)])
    assert ended.value.code
    assert "Traceback" not in (shown := capsys.readouterr().err)
    assert "broken: " in shown


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("harness=codex", "has no effect on this command; settings of runtime, evaluator, tasks have"),
        ("rollout.num_samples=3", "has no effect on this command"),
        ("tasks.path=other.jsonl", "has no effect, because"),
        ("evaluator=test_on_output", "this command grades with swe only; leave it out"),
        ("evaluator.timeout_second=900", "evaluator.timeout_second=900: unknown; known: FAIL_TO_PASS, "),
    ],
)
@pytest.mark.parametrize("command", ["validate", "twins", "audit"])
def test_a_setting_without_effect_on_a_grading_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, setting: str, says: str
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("")
    message = said(["tasks", command, str(file), setting], capsys)
    assert setting in message
    assert says in message


def test_a_timeout_of_harbors_tasks_names_its_own_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = said(["tasks", "validate", str(tmp_path), "evaluator.timeout_seconds=9"], capsys)
    assert "has no effect on Harbor's tasks; set tasks.timeout_multiplier" in message


def test_settings_choose_among_the_tasks_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tasks.jsonl"
    row = {"instance_id": "a", "problem_statement": "It breaks.", "image": "some/image"}
    file.write_text(json.dumps(row) + "\n")
    message = said(["tasks", "validate", str(file), "tasks.instance_ids=[b]"], capsys)
    assert f"{file}: no task named b; known: a" in message


@pytest.mark.parametrize("command", ["twins", "audit"])
def test_rows_without_tests_of_their_own_are_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Rows in NeMo Gym's form may lack an instance_id, by which the new field was put into the row."""
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps({"responses_create_params": {"input": "Hello"}}) + "\n")
    message = said(["tasks", command, str(file)], capsys)
    assert message.startswith(f"error: {file}:1: responses_create_params: ")
    assert "leave it out" in message
