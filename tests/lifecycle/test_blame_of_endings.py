"""A session that ends badly: what the agent brought about is scored, what the machinery did is masked."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from polar_gym.chat import ChatRequest, Completion, Delta, OnDelta
from polar_gym.engines import EngineError
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.gateway.node.node import Node
from polar_gym.harnesses.command import HARNESS as COMMAND
from polar_gym.registry import Options
from polar_gym.runtimes import Command, ExecResult, SandboxError, SandboxRequest
from polar_gym.runtimes.bubblewrap import Bubblewrap, BubblewrapSandbox
from polar_gym.schema import Episode, EvaluatorSpec, HarnessSpec, RuntimeSpec, Sampling, Workspace
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


async def run(
    tmp_path: Path, workspace: Workspace, rest: str, runtime: str = "bubblewrap", harness: str = "command"
) -> Episode:
    """An episode of a harness that asks once, and then does this, graded by whether `made` is there."""
    spec = EvaluatorSpec.model_validate({"name": "test_on_output", "command": "test -f made"})
    agent: HarnessSpec = asking(f"ask()\n{rest}").model_copy(update={"name": harness})
    async with node(tmp_path) as local:
        return await local.rollout(
            task(agent=agent, evaluator=spec, runtime=RuntimeSpec(name=runtime, workspace=workspace))
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
    spec = EvaluatorSpec.model_validate({"name": "test_on_output", "command": "test -f made"})
    runtime = RuntimeSpec(name="bubblewrap", workspace=workspace)
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as local:
        episode = await local.rollout(task(agent=agent, evaluator=spec, runtime=runtime))
    assert episode.trajectory.fidelity.excluded.keys() == {"abandoned"}
    assert episode.reward is None
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "harness_error"


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

    async def chat(self, request: ChatRequest, sampling: Sampling, on_delta: OnDelta | None = None) -> Completion:
        if not request.tools:
            raise EngineError(400, "no tools", kind="invalid_request")
        return await super().chat(request, sampling, on_delta)


async def after_acting(tmp_path: Path, workspace: Workspace, rest: str) -> Episode:
    """An episode of a harness that gets a tool call from the policy, and then does this."""
    engine = Choosy(EmbeddedOptions(scripts=[Script(commands=["true"])]))
    spec = EvaluatorSpec.model_validate({"name": "test_on_output", "command": "test -f made"})
    runtime = RuntimeSpec(name="bubblewrap", workspace=workspace)
    async with Node(engine, cache=tmp_path / "cache", state=tmp_path / "state") as local:
        return await local.rollout(
            task(agent=asking(f"ask(tools={TOOLS})\n{rest}"), evaluator=spec, runtime=runtime, timeout_seconds=5)
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
