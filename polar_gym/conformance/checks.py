"""The checks of one harness. Each looks at one or two sessions, and makes one row of the report."""

from __future__ import annotations

import asyncio
import difflib
import secrets
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from polar_gym.conformance.acting import Compacting, Delegating, ToolCalling, Vault, asks_for_summary, spawn
from polar_gym.conformance.rehearsal import Rehearsal
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.engines.embedded.shell_tools import find_shell, no_shell
from polar_gym.evaluators import Evaluator
from polar_gym.gateway.node.node import Node
from polar_gym.harnesses import HARNESSES, Harness
from polar_gym.harnesses.install import InstallError, install
from polar_gym.paths import cache_dir
from polar_gym.schema import Episode, HarnessSpec, ModelCall, RuntimeSpec, TaskRequest

TIMEOUT_SECONDS = 180.0
"""How long one session may take. Some harnesses wait for a minute before they ask again."""

SHOWN_DIFFERENCES = 3
"""How many differing lines of a prompt a row shows."""

INSTRUCTION = "Do what the script says."

UNKNOWN, FOR_GOOD = EngineError(400, "this cannot be", kind="invalid_request"), range(1000)


Verdict = Literal["pass", "fail", "n/a"]
Seen = tuple[Verdict, str]
"""A verdict and its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a report."""

    check: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A session that ended."""

    episode: Episode
    calls: list[ModelCall]

    @property
    def finished(self) -> bool:
        return self.episode.session.exit_code == 0 and self.episode.session.failure is None

    @property
    def ending(self) -> str:
        """How the session ended, in a few words; after a failure the end of what the harness printed, too."""
        session, printed = self.episode.session, self.episode.artifacts
        failure = f", {session.failure.kind}: {session.failure.message.strip()[-300:]}" if session.failure else ""
        ending = f"exit code {session.exit_code}{failure}; calls: {len(self.calls)}"
        if not session.exit_code or failure:
            return ending
        return f"{ending}; it printed: {printed.stdout.strip()[-200:]} {printed.stderr.strip()[-200:]}"

    def of_kind(self, kind: str) -> list[ModelCall]:
        return [call for call in self.calls if call.kind == kind]


class Subject:
    """The harness under test. Sessions that several checks look at are run once."""

    def __init__(self, spec: HarnessSpec, harness: Harness, runtime: str) -> None:
        self.spec, self.harness, self.runtime = spec, harness, runtime
        end = [[harness.ends_by]] if harness.ends_by else []
        self.turns = [["echo one", "echo two"], ["echo three"], *end]
        self.rehearsal = Rehearsal(self.turns)

    @cached_property
    def plain(self) -> asyncio.Task[Run]:
        """The session in which nothing goes wrong."""
        return asyncio.create_task(self.run(self.rehearsal))

    async def run(
        self, engine: EmbeddedEngine, seconds: float = TIMEOUT_SECONDS, *, evaluator: Evaluator | None = None
    ) -> Run:
        """Run a session. A harness that asks for a stream gets an answer while it is sampled."""
        request = TaskRequest(
            task_id="harness-check",
            instruction=INSTRUCTION,
            timeout_seconds=seconds,
            runtime=RuntimeSpec(name=self.runtime),
            agent=self.spec,
        )
        with tempfile.TemporaryDirectory(prefix="polar-gym-check-") as state:
            async with Node(engine, cache=cache_dir(), state=Path(state), streaming="real") as node:
                plugins = await asyncio.to_thread(node.find_plugins, request)
                graded = evaluator or plugins.evaluator
                life = node.open_session(request, plugins=replace(plugins, harness=self.harness, evaluator=graded))
                try:
                    return Run(episode=await node.conduct(life), calls=list(life.capture.calls))
                finally:
                    await node.close_session(life)

    def acting(self, kind: type[Compacting | Delegating]) -> Compacting | Delegating:
        script = Script(commands=["echo three", *([self.harness.ends_by] if self.harness.ends_by else [])])
        return kind(EmbeddedOptions(scripts=[script]))


Check = Callable[[Subject], Awaitable[Seen]]


def _judged(passed: object, reason: str) -> Seen:
    return "pass" if passed else "fail", reason


async def _wire(subject: Subject) -> Seen:
    run = await subject.plain
    providers = " and ".join(sorted({call.provider for call in run.calls})) or "no call"
    streams = {request.stream for request in subject.rehearsal.asked}
    how = "streams" if streams == {True} else "does not stream" if streams == {False} else "streams some calls"
    return _judged(run.calls, f"{providers}, {how}" if run.calls else run.ending)


async def _round_trip(subject: Subject) -> Seen:
    run = await subject.plain
    tools = [tool for call in run.calls for tool in call.tools]
    if run.calls and not find_shell(tools):
        return "fail", no_shell(tools)
    fidelity = run.episode.trajectory.fidelity
    causes = Counter(broken.cause for broken in fidelity.breaks)
    broken = ", ".join(f"{cause} ({count})" for cause, count in causes.items()) or "no break"
    told = f"continuations spliced: {fidelity.spliced}, templated again: {fidelity.canonical}; {broken}"
    done = "three" in _results(run.calls[-1]) if run.calls else False
    return _judged(done and fidelity.exact and fidelity.spliced and not fidelity.canonical and not causes, told)


async def _parallel(subject: Subject) -> Seen:
    run = await subject.plain
    both = [call for call in run.calls if "one" in _results(call) and "two" in _results(call)]
    return _judged(both, "both calls of a turn were run" if both else "the results of two calls did not come back")


def _results(call: ModelCall) -> str:
    return str([message["content"] for message in call.messages if message["role"] == "tool"])


def _retry(error: EngineError, fails: range, *, cuts: bool = False) -> Check:
    async def check(subject: Subject) -> Seen:
        await subject.plain
        if cuts and not any(request.stream for request in subject.rehearsal.asked):
            return "n/a", "it does not stream"
        engine = Rehearsal(subject.turns, error=error, fails=fails, cuts=cuts)
        run = await subject.run(engine)
        resumed = len(engine.asked) > fails.stop and run.finished
        again = f"failures: {len(fails)}; asked again and finished, {run.episode.session.timing.running or 0:.0f} s"
        return _judged(resumed, again if resumed else run.ending)

    return check


async def _compaction(subject: Subject) -> Seen:
    run = await subject.run(subject.acting(Compacting))
    asked = [call for call in run.of_kind("main") if call.index and asks_for_summary(call)]
    if found := run.of_kind("compaction"):
        return _judged(run.finished, f"calls of kind compaction: {len(found)}; {run.ending}")
    if asked:
        return "fail", f"calls of kind main that ask for a summary: {len(asked)}; does classify know compactions?"
    return "n/a", f"no call asked for a summary; at the context's end: {run.ending[:200]}"


async def _subagents(subject: Subject) -> Seen:
    plain = await subject.plain
    names = {tool["function"]["name"] for call in plain.calls for tool in call.tools}
    if spawn(names, "") is None:
        return "n/a", "none of its tools is known to start sub-agents"
    run = await subject.run(subject.acting(Delegating))
    found = run.of_kind("subagent")
    return _judged(found and run.finished, f"calls of kind subagent: {len(found)}; {run.ending}")


async def _kinds(subject: Subject) -> Seen:
    """Count conversations of kind main: a side call that `classify` does not know would be a second one."""
    run = await subject.plain
    roots = [call for call in run.of_kind("main") if call.continuation == "root"]
    return _judged(len(roots) == 1, f"{_counted(run)}; main conversations: {len(roots)}")


async def _plain_answer(subject: Subject) -> Seen:
    """Answer the first request without a tool call: a later call that `classify` does not know is trained and graded as
    the policy's."""
    if subject.harness.ends_by:
        return "n/a", "it does not end by such an answer"
    run = await subject.run(Rehearsal([]))
    return _judged(len(run.of_kind("main")) == 1 and run.finished, f"{_counted(run)}; {run.ending}")


def _counted(run: Run) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in Counter(call.kind for call in run.calls).items()) or "no call"


async def _success(subject: Subject) -> Seen:
    run = await subject.plain
    return _judged(run.finished, run.ending)


async def _api_failure(subject: Subject) -> Seen:
    run = await subject.run(Rehearsal(subject.turns, error=UNKNOWN, fails=FOR_GOOD))
    masked = run.episode.session.failure is not None
    return _judged(masked and run.episode.session.exit_code, run.ending.partition(":")[0])


async def _time_out(subject: Subject) -> Seen:
    plain = await subject.plain
    mark = f"harness-check-{secrets.token_hex(8)}"
    seconds = 5 + 2 * (plain.episode.session.timing.running or 0)
    # A pipe that is never written: some harnesses do not wait for `sleep`.
    run = await subject.run(Rehearsal([[f"mkfifo /tmp/{mark}; cat /tmp/{mark} & cat /tmp/{mark}"]]), seconds)
    left = [path.parent.name for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(path)]
    if run.episode.session.truncated_by != "time":
        return "fail", f"it ended by itself: {run.ending}"
    return _judged(not left, f"ended after {seconds:.0f} s; processes left on this machine: {len(left)}")


def _read(path: Path) -> bytes:
    with suppress(OSError):
        return path.read_bytes()
    return b""


async def _mcp(subject: Subject) -> Seen:
    """Have the policy call a tool of an environment, as `evaluator=nemo_gym` offers its tools."""
    if subject.harness.mcp_prefix is None:
        return "n/a", "not declared"
    vault = Vault()
    (tool,) = vault.tools
    script = Script(commands=[f'{tool["name"]} {{"box": 7}}'])
    run = await subject.run(ToolCalling(EmbeddedOptions(scripts=[script])), evaluator=vault)
    shown = subject.harness.mcp_prefix + tool["name"]
    names = {each["function"]["name"] for call in run.calls for each in call.tools}
    if shown not in names:
        return "fail", f"no tool {shown} among those offered: {', '.join(sorted(names)) or run.ending}"
    if vault.asked != [(tool["name"], {"box": 7})]:
        return "fail", f"calls of {shown} that reached the tool: {vault.asked}; {run.ending}"
    back = any(vault.secret in _results(call) for call in run.calls)
    told = f"{shown} was called; its result {'came back' if back else 'did not come back'}"
    return _judged(back and run.finished, told if run.finished else f"{told}; {run.ending}")


async def _stability(subject: Subject) -> Seen:
    """Compare the prompts of two sessions: all but the results of tools."""
    runs = [await subject.plain, await subject.run(Rehearsal(subject.turns))]
    first, second = ([call.prompt_ids.tolist() for call in run.calls[:1]] for run in runs)
    one, two = (_lines(run) for run in runs)
    differing = [line for line in difflib.unified_diff(one, two, n=0, lineterm="") if line[:1] in "+-"][2:]
    shown = " | ".join(line[:120] for line in differing[: 2 * SHOWN_DIFFERENCES])
    same = first == second and not differing
    return _judged(same and one, "the prompts of two runs have the same ids" if same else f"they differ: {shown}")


def _lines(run: Run) -> list[str]:
    messages = [message for call in run.calls for message in call.messages if message["role"] != "tool"]
    tools = [str(tool) for call in run.calls[:1] for tool in call.tools]
    return [line for message in messages for line in str(message["content"]).split("\\n")] + tools


_BUSY = EngineError(503, "the engine is busy", kind="overloaded")
_BROKEN = EngineError(502, "the engine's connection was reset", kind="server")

CHECKS: Mapping[str, Check] = {
    "wire": _wire,
    "tool calls": _round_trip,
    "parallel calls": _parallel,
    "retry after 503": _retry(_BUSY, range(1, 3)),
    "retry after 429": _retry(EngineError(429, "too many requests"), range(1, 3)),
    "retry after a cut stream": _retry(_BROKEN, range(1, 2), cuts=True),
    "compaction": _compaction,
    "sub-agents": _subagents,
    "kinds": _kinds,
    "plain answer": _plain_answer,
    "exit code of success": _success,
    "exit code of an API failure": _api_failure,
    "time-out": _time_out,
    "MCP": _mcp,
    "stable prompts": _stability,
}
"""Name of a row -> its check, in the order of the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The rows of a harness at one version."""

    harness: str
    package: str | None
    version: str
    pinned: str
    rows: list[Row]
    """A harness that cannot be installed has one row, `installation`."""

    @property
    def failed(self) -> list[str]:
        return [f"{row.check}: {row.reason}" for row in self.rows if row.verdict == "fail"]


async def report(
    name: str,
    harness: Harness,
    runtime: str,
    checks: Iterable[str],
    told: Callable[[str], object],
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Install a harness and check it; `told` gets the name of each check before it begins."""
    rows = []
    subject = Subject(HarnessSpec(name=name, **options or {}), harness, runtime)
    try:
        told("installation")
        if harness.package:
            await asyncio.to_thread(install, harness, cache_dir())
        for each in checks:
            told(each)
            verdict, reason = await CHECKS[each](subject)
            rows.append(Row(check=each, verdict=verdict, reason=" ".join(reason.split())))
    except InstallError as error:
        rows = [Row(check="installation", verdict="fail", reason=_brief(str(error)))]
    pinned = HARNESSES.get(name).version
    return Report(harness=name, package=harness.package, version=harness.version, pinned=pinned, rows=rows)


def _brief(message: str) -> str:
    """Return the first line of an installer's error, and the line that tells most."""
    head, *rest = message.splitlines()
    telling = [line for line in rest if "No match" in line] or rest
    return " ".join([head, *telling[-1:]])
