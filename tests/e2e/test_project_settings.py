"""Settings that a task's repository brings for the harness: a lean profile ignores them where the harness can, and an
episode names those that the harness obeyed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from polar_gym.conformance.rehearsal import Rehearsal
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.harnesses.command import HARNESS as COMMAND
from polar_gym.paths import cache_dir
from polar_gym.schema import HarnessSpec, RuntimeSpec, Workspace
from tests.support.requirements import need_bubblewrap, need_node
from tests.support.sessions import asking, node, task

MARK = "TEXT OF THE REPOSITORY"
LIMIT = {"context": 9000, "output": 77}
FILES: dict[str, dict[str, Any]] = {
    "claude_code": {
        ".claude/settings.json": {"permissions": {"deny": ["Bash"]}, "env": {"CLAUDE_CODE_MAX_OUTPUT_TOKENS": "77"}},
        "CLAUDE.md": MARK,
    },
    "opencode": {
        "opencode.json": {"tools": {"bash": False}, "agent": {"build": {"prompt": MARK}}},
        ".opencode/opencode.json": {"provider": {"gateway": {"models": {"policy": {"limit": LIMIT}}}}},
        "AGENTS.md": MARK,
    },
}
OBEDIENT = replace(COMMAND, project_settings=("my.json", ".my", "other.json"), lean_project_settings=())
FOLDERS = [
    f".{owner}/{kind}"
    for owner in ("agents", "claude", "codex", "gemini", "opencode", "pi", "qwen", "vibe")
    for kind in ("agents", "commands", "prompts", "skills")
]
"""Where one harness or another looks for what a repository adds."""
STARTED = "server-started"
SERVER = {"command": "sh", "args": ["-c", f"echo > {STARTED}"]}


def name_in(folder: str) -> str:
    return folder[1:].replace("/", "-")


def addition(folder: str) -> tuple[str, str]:
    """Return the file of an agent, a command or a skill in this folder of a repository, and its text."""
    name = name_in(folder)
    text = f"---\nname: {name}\ndescription: {MARK} in {folder}.\n---\nDo it.\n"
    return (f"{folder}/{name}/SKILL.md" if folder.endswith("skills") else f"{folder}/{name}.md"), text


def workspace(directory: Path, files: dict[str, Any]) -> RuntimeSpec:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return RuntimeSpec(name="bubblewrap", workspace=Workspace(source=str(directory)))


@pytest.mark.parametrize("harness", FILES)
async def test_a_repository_cannot_change_prompt_tools_or_limits_of_a_lean_harness(
    harness: str, tmp_path: Path
) -> None:
    """Guards against a repository that takes the shell away, or has answers sampled with a limit of its own."""
    need_node()
    need_bubblewrap()
    runtime = workspace(tmp_path / "source", FILES[harness])
    agent = HarnessSpec(name=harness, profile="lean")
    async with Node(Rehearsal([["echo ran"]]), cache=cache_dir(), state=tmp_path / "state") as local:
        episode = await local.rollout(task(agent=agent, runtime=runtime))
    assert episode.session.failure is None
    calls = read_journal(Path(str(episode.artifacts.journal)))
    assert {call.sampling["max_tokens"] for call in calls} == {16384}
    assert "ran" in [str(message["content"]).strip() for message in calls[-1].messages if message["role"] == "tool"]
    assert MARK not in str([call.messages for call in calls])
    assert episode.artifacts.project_settings == []


@pytest.mark.parametrize(
    ("harness", "profile"),
    [
        *((name, "default") for name in ("claude_code", "codex", "gemini_cli", "opencode", "pi", "qwen_code")),
        *((name, "lean") for name in ("claude_code", "codex", "gemini_cli", "opencode", "pi", "qwen_code")),
    ],
)
async def test_what_a_repository_adds_to_a_harness_is_named(
    harness: str, profile: Literal["default", "lean"], tmp_path: Path
) -> None:
    """Guards against a repository that adds agents, skills or a server to a harness without a word."""
    need_node()
    need_bubblewrap()
    agent = HarnessSpec(name=harness, profile=profile)
    files = dict(map(addition, FOLDERS)) | {".mcp.json": {"mcpServers": {"x": SERVER}}}
    runtime = workspace(tmp_path / "source", files)
    async with Node(Rehearsal([["echo ran"]]), cache=cache_dir(), state=tmp_path / "state") as local:
        episode = await local.rollout(task(agent=agent, runtime=runtime))
    assert episode.session.failure is None
    asked = str([(call.messages, call.tools) for call in read_journal(Path(str(episode.artifacts.journal)))])
    # Claude Code may leave descriptions out.
    added = {folder for folder in FOLDERS if f"{MARK} in {folder}." in asked or f"- {name_in(folder)}" in asked}
    added |= {".mcp.json"} if STARTED in episode.artifacts.diff else set()
    named = episode.artifacts.project_settings
    assert not {name for name in added if not any(name == each or name.startswith(f"{each}/") for each in named)}
    assert added or profile == "lean"


async def test_settings_that_a_harness_obeys_are_named_and_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a repository that changes the harness without a word."""
    need_bubblewrap()
    runtime = workspace(tmp_path / "source", {"my.json": {}, ".my/agents": ""})
    profiles: tuple[Literal["default", "lean"], ...] = ("lean", "default", "default")
    named: list[list[str]] = []
    async with node(tmp_path) as local:
        for profile in profiles:
            agent = asking().model_copy(update={"name": f"{__name__}:OBEDIENT", "profile": profile})
            episode = await local.rollout(task(task_id="settled", agent=agent, runtime=runtime))
            assert episode.session.failure is None
            named.append(episode.artifacts.project_settings)
    assert named == [[], ["my.json", ".my"], ["my.json", ".my"]]
    (said,) = [message for message in caplog.messages if message.startswith("task settled: ")]
    assert "my.json, .my" in said
    assert "harness.profile=lean" in said
