"""A session that ends badly: what the agent brought about is scored, what the machinery did is masked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polar_gym.chat import ChatRequest, Completion, Delta, OnDelta
from polar_gym.engines import EngineError, probe
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.session import harness_run
from polar_gym.harnesses.command import HARNESS as COMMAND
from polar_gym.registry import Options
from polar_gym.runtimes import Command, ExecResult, SandboxError, SandboxRequest
from polar_gym.runtimes.bubblewrap import Bubblewrap, BubblewrapSandbox
from polar_gym.schema import (
    Episode,
    EvaluatorSpec,
    HarnessSpec,
    RuntimeSpec,
    Sampling,
    StartFrom,
    TaskRequest,
    Workspace,
)
from polar_gym.workspaces import diff as diff_module
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, node, task


@pytest.fixture(autouse=True)
def _bubblewrap() -> None:
    need_bubblewrap()


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("text\n")
    return Workspace(source=str(source))


MADE = EvaluatorSpec.model_validate({"name": "test_on_output", "command": "test -f made"})


async def run(
    tmp_path: Path, workspace: Workspace, rest: str, runtime: str = "bubblewrap", harness: str = "command"
) -> Episode:
    """An episode of a harness that asks once, and then does this, graded by whether `made` is there."""
    agent: HarnessSpec = asking(f"ask()\n{rest}").model_copy(update={"name": harness})
    async with node(tmp_path) as local:
        return await local.rollout(
            task(agent=agent, evaluator=MADE, runtime=RuntimeSpec(name=runtime, workspace=workspace))
        )


ENDINGS = {
    "killed": "os.kill(os.getpid(), 9)",
    "terminated": "os.kill(os.getpid(), 15)",
    "aborted, as Node without memory": "os.abort()",
    "home made read-only": "os.chmod(os.environ['HOME'], 0o500); sys.exit(1)",
    "workspace removed": "__import__('shutil').rmtree('.', ignore_errors=True); os.chmod('/tmp', 0o500); sys.exit(1)",
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_harness_that_the_agent_killed_or_made_impossible_is_scored(
    tmp_path: Path, workspace: Workspace, ending: str
) -> None:
    """Else an agent that sees no way to succeed could have its failure masked."""
    episode = await run(tmp_path, workspace, ENDINGS[ending])
    assert episode.session.failure is None
    assert episode.session.exit_code != 0
    assert episode.reward == 0.0


async def test_what_a_killed_harness_left_is_graded(tmp_path: Path, workspace: Workspace) -> None:
    episode = await run(tmp_path, workspace, "open('made', 'w'); os.kill(os.getpid(), 9)")
    assert (episode.session.exit_code, episode.reward) == (137, 1.0)


class Endless(EmbeddedEngine):
    """Samples the beginning of an answer, and goes on sampling until nobody waits for the rest."""

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        deltas: list[Delta] = []
        await super().chat(request, sampling, deltas.append)
        assert on_delta is not None
        for delta in deltas[:2]:
            on_delta(delta)
        await asyncio.get_running_loop().create_future()
        raise AssertionError("the future has no result")


async def test_harness_that_gives_up_on_an_answer_of_which_it_saw_nothing_is_masked(
    tmp_path: Path, workspace: Workspace
) -> None:
    """Guards against taking the part that the gateway has received for one that the harness could act on."""
    engine = Endless(EmbeddedOptions(scripts=[Script(final_message="word " * 20)]))
    agent = asking("urllib.request.socket.setdefaulttimeout(1)\nask()")
    runtime = RuntimeSpec(name="bubblewrap", workspace=workspace)
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as local:
        episode = await local.rollout(task(agent=agent, evaluator=MADE, runtime=runtime))
    assert episode.trajectory.fidelity.excluded.keys() == {"abandoned"}
    assert episode.reward is None
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "harness_error"


class Wedged(EmbeddedEngine):
    """Answers one call, begins the answer of the next one, and sends no more of that until the time is up."""

    asked = 0

    def __init__(self, ahead: list[float], *, answers_others: bool) -> None:
        super().__init__(EmbeddedOptions(scripts=[Script(final_message="word " * 20)]))
        self.ahead, self.answers_others = ahead, answers_others

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        self.asked += 1
        deltas: list[Delta] = []
        completion = await super().chat(request, sampling, deltas.append)
        wedged = self.asked == 2 or (self.asked > 2 and not self.answers_others)
        for delta in deltas[: 2 if wedged else None]:
            if on_delta is not None:
                on_delta(delta)
        if wedged:
            self.ahead[0] = 3600.0
            await asyncio.get_running_loop().create_future()
        return completion


@pytest.mark.parametrize(
    ("silence", "answers_others", "failure"),
    [(30.0, False, "engine_error"), (30.0, True, None), (7200.0, False, None)],
    ids=["wedged", "slow", "not silent for long"],
)
async def test_an_engine_that_is_wedged_in_the_middle_of_an_answer_is_masked(
    tmp_path: Path,
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    silence: float,
    answers_others: bool,
    failure: str | None,
) -> None:
    """Guards against a reward of 0 for a session whose engine stood still until the time was up."""
    monkeypatch.setattr(probe, "PROBE_SECONDS", 3.0)
    monkeypatch.setattr(harness_run, "SILENCE_SECONDS", silence)
    loop, ahead = asyncio.get_running_loop(), [0.0]
    loop_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: loop_time() + ahead[0])
    engine = Wedged(ahead, answers_others=answers_others)
    runtime = RuntimeSpec(name="bubblewrap", workspace=workspace)
    request = task(agent=asking("ask(); ask()"), evaluator=MADE, runtime=runtime, timeout_seconds=3600)
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as local:
        episode = await local.rollout(request)
    assert episode.trajectory.fidelity.excluded.keys() == {"time"}
    assert (episode.session.failure.kind if episode.session.failure else None) == failure
    assert (episode.session.truncated_by, episode.reward) == ("time", 0.0 if failure is None else None)


STRUCTURED = replace(COMMAND, acts_on_text=False)
"""A harness that takes structured tool calls only, as all but two of ours."""


async def test_harness_that_gives_up_before_the_agent_could_act_is_masked(tmp_path: Path, workspace: Workspace) -> None:
    """Such a harness runs no text, and the policy has answered with nothing else."""
    episode = await run(tmp_path, workspace, "sys.exit('no more ideas')", harness=f"{__name__}:STRUCTURED")
    assert episode.reward is None
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "harness_error"


PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}]


class Choosy(EmbeddedEngine):
    """Refuses every request without tools, as vLLM does one whose schema it cannot compile."""

    refusal: ClassVar = (400, "no tools", "invalid_request")

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        if not request.tools:
            status, message, kind = self.refusal
            raise EngineError(status, message, kind=kind)
        return await super().chat(request, sampling, on_delta)


class Unloaded(Choosy):
    """Refuses such requests as vLLM does while an adapter is loaded anew."""

    refusal = (404, "The model `adapter` does not exist.", "not_found")


async def after_acting(tmp_path: Path, workspace: Workspace, rest: str, made: type[Choosy] = Choosy) -> Episode:
    """An episode of a harness that gets a tool call from the policy, and then does this."""
    engine = made(EmbeddedOptions(scripts=[Script(commands=["true"])]))
    runtime = RuntimeSpec(name="bubblewrap", workspace=workspace)
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as local:
        return await local.rollout(
            task(agent=asking(f"ask(tools={TOOLS})\n{rest}"), evaluator=MADE, runtime=runtime, timeout_seconds=5)
        )


REFUSED = "try: ask()\nexcept OSError: pass\n"
"""A request that the engine refuses, as the agent can send one too."""


@pytest.mark.parametrize(
    "rest", ["sys.exit(1)", "sys.exit(41)", f"{REFUSED}sys.exit(1)", f"{REFUSED}while True: pass", "ask(tools='none')"]
)
async def test_harness_that_fails_after_the_agent_has_acted_is_scored(
    tmp_path: Path, workspace: Workspace, rest: str
) -> None:
    """The agent may have written to the harness's own files: such an end could be bought."""
    episode = await after_acting(tmp_path, workspace, rest)
    assert (episode.session.failure, episode.reward) == (None, 0.0)
    assert episode.trajectory.fidelity.calls == 1 + ("ask()" in rest)


async def test_harness_that_gives_up_on_a_model_that_is_not_served_is_masked(
    tmp_path: Path, workspace: Workspace
) -> None:
    """Guards against unfinished work that is graded because a call came while a trainer loaded its adapter anew. The
    gateway names the model, so the agent cannot bring this about."""
    episode = await after_acting(tmp_path, workspace, f"{REFUSED}sys.exit(1)", Unloaded)
    assert episode.session.failure is not None
    assert (episode.session.failure.kind, episode.reward) == ("engine_error", None)


async def test_what_a_failed_harness_left_is_graded(tmp_path: Path, workspace: Workspace) -> None:
    episode = await after_acting(tmp_path, workspace, "open('made', 'w'); sys.exit('no more ideas')")
    assert (episode.session.exit_code, episode.reward) == (1, 1.0)
    assert "no more ideas" in episode.artifacts.stderr


async def test_kill_before_any_answer_is_masked(tmp_path: Path, workspace: Workspace) -> None:
    """No answer of the policy's has reached the sandbox: it cannot be its doing."""
    agent = asking("os.kill(os.getpid(), 9)")
    async with node(tmp_path) as local:
        episode = await local.rollout(task(agent=agent, runtime=RuntimeSpec(name="bubblewrap", workspace=workspace)))
    assert episode.reward is None


async def test_a_harness_that_hangs_before_its_first_call_is_masked(tmp_path: Path, workspace: Workspace) -> None:
    """Guards against a session of which the policy knows nothing, and which counts as its failure."""
    agent = asking("import time; time.sleep(3600)")
    runtime = RuntimeSpec(name="bubblewrap", workspace=workspace)
    async with node(tmp_path) as local:
        episode = await local.rollout(task(agent=agent, evaluator=MADE, runtime=runtime, timeout_seconds=2))
    assert (episode.session.truncated_by, episode.reward) == ("time", None)
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "harness_error"
    assert "ended before its first model call" in episode.session.failure.message


def titled(headers: object, body: dict[str, Any]) -> dict[str, str]:
    return {"kind": "auxiliary"} if body["messages"][0]["content"] == "title" else {}


TITLED = replace(COMMAND, classify=titled)
"""A harness whose calls with the text `title` are beside the work."""


def by_its_workspace(workspace: Workspace, lines: str) -> TaskRequest:
    """A request whose harness runs the lines that its workspace has: a record's may be other ones."""
    (Path(str(workspace.source)) / "lines").write_text(f"import time\n{lines}")
    agent = asking("exec(open('lines').read())").model_copy(update={"name": f"{__name__}:TITLED"})
    return task(agent=agent, evaluator=MADE, runtime=RuntimeSpec(name="bubblewrap", workspace=workspace))


def going_on(first: Episode, request: TaskRequest, **fields: Any) -> TaskRequest:
    start = StartFrom(record=str(Path(str(first.artifacts.journal)).parent), owned=True)
    return request.model_copy(update={"start_from": start, **fields})


def acting(tmp_path: Path) -> Node:
    """A node whose policy calls a tool once."""
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(commands=["true"], final_message="Done.")]))
    return Node(engine, cache=tmp_path / "cache", state=tmp_path / "state")


FIRST = f"said = json.loads(ask(tools={TOOLS}))['choices'][0]['message']\n"
RESULT = "{'role': 'tool', 'tool_call_id': said['tool_calls'][0]['id'], 'content': 'ran'}"
SECOND = f"ask(tools={TOOLS}, messages=[{{'role': 'user', 'content': 'x'}}, said, {RESULT}])\n"
TITLE = "ask(messages=[{'role': 'user', 'content': 'title'}])\n"
BEHIND = {
    "cannot start": "sys.exit('no memory')",
    "ends": "",
    "fails halfway": f"{FIRST}sys.exit('no memory')",
    "is killed halfway": f"{FIRST}os.kill(os.getpid(), 9)",
    "fails halfway, after a new title": f"{FIRST}{TITLE}sys.exit('no memory')",
    "hangs halfway": f"{FIRST}time.sleep(3600)",
}


@pytest.mark.parametrize("ending", BEHIND)
async def test_a_harness_that_does_not_come_to_the_end_of_its_record_is_masked(
    tmp_path: Path, workspace: Workspace, ending: str
) -> None:
    """Guards against recorded calls that count as acts in a sandbox in which nobody asked for them."""
    async with acting(tmp_path) as local:
        first = await local.rollout(by_its_workspace(workspace, f"{FIRST}{SECOND}"))
        request = by_its_workspace(workspace, BEHIND[ending])
        again = going_on(first, request, timeout_seconds=2 if "hangs" in ending else request.timeout_seconds)
        resumed = await local.rollout(again)
    assert (first.reward, resumed.reward) == (0.0, None)
    assert resumed.session.failure is not None
    assert resumed.session.failure.kind == "diverged", "the sample begins again"
    assert ("no memory" in resumed.session.failure.message) == ("no memory" in BEHIND[ending])
    assert resumed.trajectory.fidelity.sampled_tokens >= first.trajectory.fidelity.sampled_tokens


async def test_a_harness_that_comes_to_the_end_of_its_record_is_scored(tmp_path: Path, workspace: Workspace) -> None:
    """Guards against a session that begins again because it asked for no title, or because it is a branch."""
    async with acting(tmp_path) as local:
        first = await local.rollout(by_its_workspace(workspace, f"{FIRST}{SECOND}{TITLE}"))
        again = going_on(first, by_its_workspace(workspace, f"{FIRST}{SECOND}sys.exit(1)"))
        resumed = await local.rollout(again)
        branch = StartFrom(record=again.start_from.record, calls=2) if again.start_from else None
        branched = await local.rollout(again.model_copy(update={"start_from": branch}))
    assert resumed.trajectory.fidelity.excluded.keys() == {"abandoned"}, "the title"
    for episode in (resumed, branched):
        assert (episode.session.failure, episode.reward) == (None, 0.0)


async def test_an_answer_that_an_earlier_attempt_cut_off_is_no_act(tmp_path: Path, workspace: Workspace) -> None:
    """Guards against a harness that cannot start in its new sandbox, and whose policy is to blame for that."""
    engine = Endless(EmbeddedOptions(scripts=[Script(final_message="word " * 20)]))
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state", streaming="real") as local:
        first = await local.rollout(by_its_workspace(workspace, "ask()").model_copy(update={"timeout_seconds": 5}))
        assert first.trajectory.fidelity.excluded.keys() == {"time"}
        resumed = await local.rollout(going_on(first, by_its_workspace(workspace, "sys.exit('no memory')")))
    assert resumed.trajectory.fidelity.excluded.keys() == {"time"}, "it stays in the books"
    assert resumed.session.failure is not None
    assert resumed.session.failure.kind == "harness_error"


class Vanishing:
    """Bubblewrap whose sandbox is gone once the harness has ended, as after `docker kill` from outside."""

    Options = Options

    def __init__(self, options: Options) -> None:
        self._real = Bubblewrap(Bubblewrap.Options())

    async def start(self, request: SandboxRequest) -> BubblewrapSandbox:
        sandbox = await self._real.start(request)
        execute = sandbox.exec
        ran: list[bool] = []

        async def once(command: Command) -> ExecResult:
            if ran:
                raise SandboxError("the container is gone")
            if request.serve is not None and "python3" in command.argv[0]:
                ran.append(True)
            return await execute(command)

        sandbox.exec = once  # pyright: ignore[reportAttributeAccessIssue]
        return sandbox

    def check(self) -> list[str]:
        return []

    def caveats(self) -> list[str]:
        return []

    async def reap(self, session_ids: object) -> int:
        return 0

    async def close(self) -> None:
        await self._real.close()


@pytest.mark.parametrize("rest", ["os.kill(os.getpid(), 9)", "sys.exit(1)", ""])
async def test_sandbox_that_vanishes_is_masked(tmp_path: Path, workspace: Workspace, rest: str) -> None:
    episode = await run(tmp_path, workspace, rest, runtime=f"{__name__}:Vanishing")
    assert episode.reward is None
    assert episode.session.failure is not None
    assert "the container is gone" in episode.session.failure.message


async def test_diff_that_is_too_long_is_scored(
    tmp_path: Path, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_module, "MAX_DIFF", 1000)
    episode = await run(tmp_path, workspace, "open('made', 'w').write('x\\n' * 1000)")
    assert episode.reward == 0.0
    assert episode.evaluation is not None
    assert "longer than 1000 bytes" in episode.evaluation.detail


async def test_files_that_are_not_carried_are_named(tmp_path: Path, workspace: Workspace) -> None:
    episode = await run(tmp_path, workspace, "open('/tmp/elsewhere', 'w'); open('made', 'w')")
    assert episode.reward == 1.0
    assert episode.artifacts.not_carried == ["/tmp/elsewhere"]


async def test_fields_for_which_requests_were_refused_are_named(tmp_path: Path, workspace: Workspace) -> None:
    """Guards against a run that broke off at a request which the gateway cannot translate, and whose episode looks like
    an honest failure."""
    refused = "messages=[{'role': 'user', 'content': [{'type': 'tape'}]}]"
    episode = await run(tmp_path, workspace, f"try: ask({refused})\nexcept OSError: sys.exit(1)")
    assert episode.trajectory.fidelity.calls == 1
    assert episode.artifacts.refused_fields == ["messages[].content[].type"]
