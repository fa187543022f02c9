"""swebench's eval script, run as two commands."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from polar_gym.evaluators import eval_script
from polar_gym.evaluators.swebench_report import END, START
from polar_gym.evaluators.witness import Witness
from polar_gym.runtimes import Command, ExecResult

SCRIPT = f"""\
set -u
cat > patch <<'END_OF_PATCH'
{{}}
END_OF_PATCH
echo "${{{{PYTHONPATH-}}}}" > before
{{}}
: '{START}'
echo "$PYTHONPATH" > during
{{}}
false
: '{END}'
"""
Run = Callable[[str], ExecResult]


class Machine:
    """Runs the commands of a sandbox on this machine."""

    base_url = ""

    async def exec(self, command: Command) -> ExecResult:
        ended = await asyncio.to_thread(
            subprocess.run, command.argv, input=command.stdin, capture_output=True, check=False
        )
        return ExecResult(exit_code=ended.returncode, stdout=ended.stdout, stderr=ended.stderr)

    async def stop(self) -> None:
        raise NotImplementedError


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    made = Witness()
    made.directory, made.key_file = str(tmp_path / "witness"), str(tmp_path / "witness" / "key")
    return made


@pytest.fixture
def run(tmp_path: Path, witness: Witness, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a script with a test file in a directory."""
    monkeypatch.setattr(eval_script, "KILL_OTHERS", ":")  # it ends all processes of the machine
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)

    def in_directory(script: str) -> ExecResult:
        texts = {"test_a.py": b"\x00"}
        return asyncio.run(eval_script.run(Machine(), script, str(tmp_path), texts, witness, Command(argv=[])))

    return in_directory


@pytest.mark.parametrize("separator", ["\r\n", "\r", "\f", "\v", "\x1c", "\x85", "\u2028"])
def test_a_patch_in_the_script_stays_as_it_is(separator: str, run: Run, tmp_path: Path) -> None:
    """Guards against a test patch that does not apply, so that its data files are missing."""
    run(SCRIPT.format(f"+a{separator}b", "", ""))
    assert (tmp_path / "patch").read_bytes() == f"+a{separator}b\n".encode()


def test_only_the_tests_run_under_the_witness(run: Run, tmp_path: Path, witness: Witness) -> None:
    """Guards against a program before the tests that takes the witness's key, such as `conda activate testbed`."""
    result = run(SCRIPT.format("", "ls > files-before; ls -a $HOME > home-before", ""))
    assert (tmp_path / "before").read_text() == "\n"
    assert (tmp_path / "files-before").read_text() == "before\nfiles-before\npatch\n"
    assert ".polar-gym" not in (tmp_path / "home-before").read_text()
    assert (tmp_path / "during").read_text() == f"{witness.directory}\n"
    assert (tmp_path / "test_a.py").read_bytes() == b"\x00"
    assert Path(witness.key_file).read_bytes() == witness.key
    assert result.stdout.decode().splitlines()[-1].endswith(": 1")


STATE = """
shopt -s extglob
declare -A names=([one]="a b" ["two 2"]=$'c\\n"d"')
words=(x "y z"); plain="it's \\$HOME"; export EXPORTED=1
letters() { case $1 in +([a-z])) echo letters;; *) echo others;; esac; }
mkdir -p "a directory"; cd "a directory"; umask 027
set -o pipefail
"""
SAME_STATE = """
{ shopt -q extglob && echo "${names[one]} ${names[two 2]} ${words[1]} $plain" && letters abc; } >> ../state
(umask; basename "$PWD"; echo "$EXPORTED $-"; set -o | grep -E 'pipefail|nounset|errexit') >> ../state
"""


def test_the_tests_run_in_the_state_of_the_lines_before(run: Run, tmp_path: Path) -> None:
    """Guards against variables, functions, options and a directory that are set before the tests and lost in them."""
    result = run(SCRIPT.format("", STATE, SAME_STATE))
    said = (tmp_path / "state").read_text().splitlines()
    assert said[:3] == ["a b c", '"d" y z it\'s $HOME', "letters"], result.stdout.decode()
    assert said[3:5] == ["0027", "a directory"]
    exported, flags = said[5].split()
    assert exported == "1"
    assert {*flags} >= {"u", "x"}
    options = dict(line.split() for line in said[6:])
    assert options == {"errexit": "off", "nounset": "on", "pipefail": "on"}


@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$", "set -e; false"])
def test_no_test_runs_where_the_lines_before_end_the_script(end: str, run: Run, tmp_path: Path) -> None:
    """Guards against tested code that ends the shell before the tests, and against a state of its own making."""
    result = run(SCRIPT.format("", end, ""))
    assert not (tmp_path / "during").exists()
    assert END not in result.stdout.decode()
    assert result.exit_code == (-signal.SIGKILL if "kill" in end else 1 if "false" in end else 0)


def test_programs_before_the_tests_cannot_read_the_script(run: Run, tmp_path: Path) -> None:
    """Guards against tested code that reads the hidden tests in the script, or writes other lines into the script."""
    result = run(f"tr '\\0' '\\n' < /proc/$$/cmdline > argv; cat > rest\n: '{START}'\n# hidden\n: '{END}'")
    assert (tmp_path / "argv").read_text() == "bash\n-s\n"
    assert (tmp_path / "rest").read_bytes() == b""
    assert END in result.stdout.decode()
