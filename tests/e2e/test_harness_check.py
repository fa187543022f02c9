"""`polar-gym harness check` on real harnesses, and on harnesses of a few lines that break a promise each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polar_gym.cli import main
from polar_gym.conformance.checks import Row, report
from polar_gym.harnesses import Harness, Launch, LaunchContext
from tests.support.requirements import need_bubblewrap, need_node

ROWS = (
    "wire",
    "tool calls",
    "parallel calls",
    "retry after a cut stream",
    "kinds",
    "plain answer",
    "exit code of success",
    "MCP",
)

_ASK = """\
import json, os, random, subprocess, sys, urllib.request
def ask(messages, tools):
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    head = {"Authorization": "Bearer " + os.environ["KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["URL"] + "/v1/chat/completions", body, head)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
shell = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
tools = [{"type": "function", "function": {"name": "bash", "parameters": shell}}]
"""

_CARELESS = """\
messages = [{"role": "user", "content": f"go {random.random()}"}]
try:
    ask([{"role": "user", "content": "a title, please"}], [])
    while calls := (said := ask(messages, tools)).get("tool_calls"):
        messages.append(said)
        for call in calls[:1]:
            command = json.loads(call["function"]["arguments"])["command"]
            done = subprocess.run(["sh", "-c", command], capture_output=True)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout.decode()})
        said["tool_calls"] = calls[:1]
except OSError:
    pass
"""


def _launch(context: LaunchContext) -> Launch:
    environment = {"URL": context.base_url, "KEY": context.api_key}
    return Launch(argv=["python3", "-c", _ASK + _CARELESS], environment=environment)


CARELESS = Harness(launch=_launch)
"""Runs one call of a turn, hides errors, has a title made that `classify` does not know, and writes chance into its
prompt."""


def test_a_python_function_is_checked_with_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need_bubblewrap()
    agent = tmp_path / "agent.py"
    agent.write_text(
        "import os\ndef run(instruction, base_url, api_key, model):\n    os.environ.update(URL=base_url, KEY=api_key)\n"
        f"    exec({_ASK + _CARELESS!r}, {{}})\n"
    )
    words = ["python", f"harness.target={agent}:run", "--row", "wire", "--runtime", "bubblewrap", "--json"]
    with pytest.raises(SystemExit) as ended:
        main(["harness", "check", *words])
    (found,) = json.loads(capsys.readouterr().out)
    assert (ended.value.code, found["rows"][0]["verdict"]) == (0, "pass"), found


def test_a_real_harness_passes(capsys: pytest.CaptureFixture[str]) -> None:
    need_node()
    need_bubblewrap()
    with pytest.raises(SystemExit) as ended:
        main(["harness", "check", "pi", "--runtime", "bubblewrap", "--json", *(f"--row={row}" for row in ROWS)])
    (found,) = json.loads(capsys.readouterr().out)
    assert ended.value.code == 0, found
    assert (found["harness"], found["version"]) == ("pi", found["pinned"])
    assert {row["check"]: row["verdict"] for row in found["rows"]} == dict.fromkeys(ROWS, "pass")


async def test_a_harness_that_breaks_promises_fails_their_rows() -> None:
    need_bubblewrap()
    rows = (
        "wire",
        "parallel calls",
        "retry after 503",
        "kinds",
        "plain answer",
        "exit code of an API failure",
        "time-out",
        "stable prompts",
    )
    name = "tests.e2e.test_harness_check:CARELESS"
    found = {row.check: row for row in (await report(name, CARELESS, "bubblewrap", rows, print)).rows}
    assert {each for each, row in found.items() if row.verdict == "fail"} == {*rows} - {"wire", "time-out"}
    assert found["wire"] == Row(check="wire", verdict="pass", reason="openai_chat, does not stream")
    assert found["kinds"].reason == "4 main; main conversations: 3"
    assert found["plain answer"].reason == "2 main; exit code 0; calls: 2"
    assert "exit code 0" in found["exit code of an API failure"].reason
    assert found["time-out"].reason.endswith("processes left on this machine: 0"), "no other machine is looked into"
    assert "+go 0." in found["stable prompts"].reason


_FORGETFUL = """\
messages = [{"role": "user", "content": "go"}]
while calls := (said := ask(messages, tools)).get("tool_calls"):
    arguments = json.loads(calls[0]["function"]["arguments"])
    done = subprocess.run(["sh", "-c", arguments["command"]], capture_output=True)
    messages += [said, {"role": "tool", "tool_call_id": calls[0]["id"], "content": done.stdout.decode()}]
    if len(messages) > 4:
        order = {"role": "user", "content": "Please summarize our conversation."}
        summary = ask([*messages, order], tools)["content"]
        messages = [{"role": "user", "content": "Here is a summary of our conversation: " + summary}]
"""


async def test_compactions_that_classify_does_not_know_fail_their_row() -> None:
    """Guards against "it does not compact", said of a harness that asks for summaries and offers its tools with it."""
    need_bubblewrap()

    def launch(context: LaunchContext) -> Launch:
        return replace(_launch(context), argv=["python3", "-c", _ASK + _FORGETFUL])

    def classify(headers: Mapping[str, str], body: Mapping[str, Any]) -> dict[str, str]:
        return {"kind": "compaction"} if body["messages"][-1]["content"].startswith("Please summarize") else {}

    name = "tests.e2e.test_harness_check:CARELESS"
    for harness, verdict, reason in (
        (Harness(launch=launch), "fail", "calls of kind main that ask for a summary: 1; does classify know"),
        (Harness(launch=launch, classify=classify), "pass", "calls of kind compaction: 1; exit code 0"),
    ):
        (row,) = (await report(name, harness, "bubblewrap", ["compaction"], print)).rows
        assert row.verdict == verdict, row
        assert row.reason.startswith(reason)


async def test_tools_that_the_policy_does_not_know_are_named() -> None:
    """Guards against a row that says "no continuation" where the scripted policy found nothing to call."""
    need_bubblewrap()

    def launch(context: LaunchContext) -> Launch:
        return replace(_launch(context), argv=["python3", "-c", _ASK.replace('"bash"', '"do"') + _CARELESS])

    name = "tests.e2e.test_harness_check:CARELESS"
    (row,) = (await report(name, Harness(launch=launch), "bubblewrap", ["tool calls"], print)).rows
    reason = "the scripted policy knows no tool that runs commands among those offered: do"
    assert (row.verdict, row.reason) == ("fail", reason)


async def test_a_row_that_fails_says_what_the_harness_printed() -> None:
    """Guards against "exit code 1; calls: 4", from which no author of a harness file can tell the cause."""
    need_bubblewrap()

    def launch(context: LaunchContext) -> Launch:
        return replace(_launch(context), argv=["python3", "-c", f"{_ASK}{_CARELESS}sys.exit('I have no licence')"])

    name = "tests.e2e.test_harness_check:CARELESS"
    (row,) = (await report(name, Harness(launch=launch), "bubblewrap", ["exit code of success"], print)).rows
    assert (row.verdict, row.reason) == ("fail", "exit code 1; calls: 4; it printed: I have no licence")


async def test_a_harness_that_leaves_out_the_tools_of_an_environment_fails() -> None:
    """Guards against a row that believes what a harness file declares."""
    need_bubblewrap()
    claims = replace(CARELESS, mcp_prefix="")
    (row,) = (await report("tests.e2e.test_harness_check:CARELESS", claims, "bubblewrap", ["MCP"], print)).rows
    assert (row.verdict, row.reason) == ("fail", "no tool open_vault among those offered: bash")
