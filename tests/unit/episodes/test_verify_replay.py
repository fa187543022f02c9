"""`polar-gym verify` repeats the choices that the sampler of a mixture-of-experts model made in a real session."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polar_gym.builders import build_trajectory
from polar_gym.cli import main
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions
from polar_gym.episodes.reading import read_calls, read_episodes
from polar_gym.episodes.verify import Verification, verify
from polar_gym.gateway.node.node import Node
from polar_gym.gateway.proxy.journal import Journal
from polar_gym.schema import BuilderSpec, Episode, ModelCall, ReplayRecord, Sampling, SamplingMask
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, task
from tests.support.tiny_model import write_tiny_moe

BOUND = 1e-4
REPEATED = "free, repeating temperature, sampling mask, routed experts"
CUT = Sampling(temperature=0.8, top_p=0.95, seed=5)
TURNS = """
messages = [{"role": "user", "content": "Say something."}]
for _ in range(3):
    answer = json.loads(ask(messages=messages, max_tokens=30))["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
"""


def engine_of(path: Path, *record: ReplayRecord) -> EmbeddedEngine:
    options = EmbeddedOptions(
        policy="transformers", model_path=path, device="cpu", dtype="float32", record=list(record)
    )
    return EmbeddedEngine(options)


def rollout(model: Path, directory: Path, sampling: Sampling, *record: ReplayRecord) -> Path:
    """The file of the episode of a harness that makes three calls of one conversation."""

    async def run() -> Episode:
        async with Node(engine_of(model, *record), cache=directory / "cache", state=directory / "state") as node:
            return await node.rollout(task(agent=asking(TURNS), sampling=sampling))

    episode = asyncio.run(run())
    assert episode.session.failure is None
    (directory / "episodes.jsonl").write_bytes(episode.to_json() + b"\n")
    return directory / "episodes.jsonl"


@pytest.fixture(scope="module", params=["Qwen3Moe", "Mixtral", "MiniMaxM2"])
def session(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A model, and the file of an episode that it sampled at temperature 0.8 and top-p 0.95, with all records."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not here; `make test` runs these on the interpreter that has it")
    need_bubblewrap()
    directory = tmp_path_factory.mktemp("session")
    write_tiny_moe(directory / "model", request.param)
    return directory / "model", rollout(directory / "model", directory, CUT, "routed_experts", "sampling_mask")


def episode_of(file: Path) -> Episode:
    (episode,) = read_episodes(file)
    return episode


def rebuilt(file: Path, directory: Path, change: Callable[[ModelCall], object]) -> Episode:
    """The episode of a file after a change of its calls: the change is in the journal and in the traces."""
    episode = episode_of(file)
    calls = read_calls(episode)
    (directory / "s.jsonl").unlink(missing_ok=True)
    journal = Journal(directory / "s.jsonl")
    for call in calls:
        change(call)
        journal.append(call)
    journal.close()
    trajectory = build_trajectory(calls, BuilderSpec(name="prefix_merging"))
    artifacts = episode.artifacts.model_copy(update={"journal": str(journal.path)})
    return episode.model_copy(update={"trajectory": trajectory, "artifacts": artifacts})


def verified(
    model: Path, episode: Episode, through: Callable[[EmbeddedEngine], Any] = lambda engine: engine
) -> Verification:
    async def run() -> Verification:
        engine = engine_of(model)
        await engine.start()
        try:
            return await verify([episode], through(engine))
        finally:
            await engine.close()

    result = asyncio.run(run())
    assert result.broken == []
    return result


def largest(result: Verification, way: str = REPEATED) -> float:
    """The largest difference, of calls that were all compared in one way."""
    assert list(result.compared) == [way]
    assert result.not_comparable == 0
    return float(np.concatenate(result.compared[way]).max())


def test_a_session_that_was_cut_and_routed_gives_its_logprobs_again(
    session: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the three spliced calls join, and each call tells its own rows only."""
    model, file = session
    episode = episode_of(file)
    calls = read_calls(episode)
    assert [call.continuation for call in calls] == ["root", "spliced", "spliced"]
    (trace,) = episode.trajectory.traces
    assert trace.routed_experts is not None
    assert trace.routed_experts.shape == (len(trace.prompt_ids) + len(trace.response_ids) - 1, 2, 2)
    ends = [len(call.prompt_ids) + len(call.response_ids) - 1 for call in calls]
    rows = [len(call.routed_experts) for call in calls if call.routed_experts is not None]
    assert rows == [ends[0], ends[1] - ends[0], ends[2] - ends[1]]
    monkeypatch.setenv("COLUMNS", "300")
    settings = ["engine=embedded", "engine.policy=transformers", f"engine.model_path={model}", "engine.dtype=float32"]
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(file), *settings, "engine.device=cpu"])
    told = capsys.readouterr().out
    assert ended.value.code == 0
    assert "exact: 1 of 1 traces" in told
    assert f"logprobs, {REPEATED}: {sum(len(call.response_ids) for call in calls)} tokens" in told
    assert ", 0 beyond 0.0001" in told
    assert "not comparable" not in told


def test_other_experts_and_other_kept_sets_show(session: tuple[Path, Path], tmp_path: Path) -> None:
    model, file = session
    assert largest(verified(model, episode_of(file))) < BOUND

    def another_expert(call: ModelCall) -> None:
        if call.index == 0 and call.routed_experts is not None:
            row = call.routed_experts[-9, 0]
            row[0] = next(expert for expert in range(4) if expert not in row)

    def a_smaller_set(call: ModelCall) -> None:
        if call.sampling_mask is not None:
            sets = call.sampling_mask.sets()
            sets[3] = sets[3][(sets[3] == call.response_ids[3]) | (np.arange(len(sets[3])) % 2 == 0)]
            call.sampling_mask = SamplingMask.of(sets)

    def without_sets(call: ModelCall) -> None:
        call.sampling_mask = None

    assert largest(verified(model, rebuilt(file, tmp_path, lambda call: None))) < BOUND
    assert largest(verified(model, rebuilt(file, tmp_path, another_expert))) > 100 * BOUND
    assert largest(verified(model, rebuilt(file, tmp_path, a_smaller_set))) > 100 * BOUND
    unknown = verified(model, rebuilt(file, tmp_path, without_sets))
    assert (unknown.compared, unknown.not_comparable) == ({}, 90)


@pytest.mark.parametrize("session", ["MiniMaxM2"], indirect=True)
def test_forcing_makes_up_for_routers_that_choose_others(session: tuple[Path, Path], tmp_path: Path) -> None:
    """The bias of these routers, which a trainer moves all the time, decides which experts are chosen, and not their
    weights: with forced experts, another bias changes no logprob."""
    model, file = session
    transformers: Any = importlib.import_module("transformers")
    torch: Any = importlib.import_module("torch")
    moved = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    for name, bias in moved.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias += torch.linspace(0, 1, len(bias))
    moved.save_pretrained(tmp_path / "moved")
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "moved")
    assert largest(verified(tmp_path / "moved", episode_of(file))) < BOUND

    def without_experts(call: ModelCall) -> None:
        call.routed_experts = None

    free = verified(tmp_path / "moved", rebuilt(file, tmp_path, without_experts))
    assert largest(free, "free, repeating temperature, sampling mask") > 100 * BOUND


class ScoresOnly:
    """An engine that scores ids and repeats nothing, as vLLM does."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.score = engine.score


@pytest.mark.parametrize("session", ["Qwen3Moe"], indirect=True)
@pytest.mark.parametrize(
    ("sampling", "embedded", "others"),
    [
        (Sampling(seed=5), "free, repeating routed experts", "free, experts not repeated"),
        (Sampling(seed=5, temperature=1.3), "free, repeating temperature, routed experts", None),
        (Sampling(seed=5, temperature=0.8, top_k=9, presence_penalty=0.1), None, None),
        (Sampling(temperature=0.0), None, None),
    ],
)
def test_the_ways_in_which_tokens_are_compared(
    session: tuple[Path, Path], tmp_path: Path, sampling: Sampling, embedded: str | None, others: str | None
) -> None:
    model, _ = session
    episode = episode_of(rollout(model, tmp_path, sampling, "routed_experts", "sampling_mask"))
    for way, result in ((embedded, verified(model, episode)), (others, verified(model, episode, ScoresOnly))):
        if way is None:
            assert (result.compared, result.not_comparable) == ({}, episode.trajectory.fidelity.trainable_tokens)
        else:
            assert largest(result, way) < BOUND
