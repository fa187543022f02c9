"""Episodes and journals of an earlier version are read: `old/` holds those of commit e0d370c, with made-up paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from polar_gym.episodes.reading import read_calls, read_episodes
from polar_gym.episodes.verify import verify
from polar_gym.errors import ConfigError
from polar_gym.schema import Episode

OLD = Path(__file__).parent / "old"


def old_episode() -> Episode:
    """Return the old episode, whose journal lies beside it."""
    (episode,) = read_episodes(OLD / "episode.jsonl")
    episode.artifacts.journal = str(OLD / "calls.jsonl")
    return episode


def holds(new: Any, old: Any) -> bool:
    """Return whether `new` is `old` with more fields."""
    if isinstance(old, dict):
        return all(name in new and holds(new[name], value) for name, value in old.items())
    if isinstance(old, list):
        return len(new) == len(old) and all(map(holds, new, old))
    return new == old


async def test_an_old_episode_passes_the_exact_test_against_its_old_journal() -> None:
    result = await verify([old_episode()], None)
    assert (result.traces, result.calls, result.broken) == (1, 2, [])


def test_an_old_episode_keeps_every_field_and_gets_the_defaults_of_new_ones() -> None:
    (episode,) = read_episodes(OLD / "episode.jsonl")
    assert holds(orjson.loads(episode.to_json()), orjson.loads((OLD / "episode.jsonl").read_bytes()))
    assert episode.request.agent.today is None
    assert episode.trajectory.fidelity.single_tool_call == 0


def test_an_old_journal_holds_the_calls_of_its_episode() -> None:
    episode = old_episode()
    first, second = read_calls(episode)
    (trace,) = episode.trajectory.traces
    assert [first.call_id, second.call_id] == trace.call_ids
    assert first.response_ids.tolist() == trace.response_ids[: len(first.response_ids)].tolist()
    assert not first.single_tool_call


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("request", "runtime", "workspace"), {"path": "/usr/bin"}, r"request\.runtime\.workspace\.path='/usr/bin': "),
        (("session", "color"), "red", r"session\.color='red': unknown key; known here: "),
    ],
)
def test_an_episode_that_does_not_fit_is_refused_by_its_field(
    tmp_path: Path, place: tuple[str, ...], value: Any, said: str
) -> None:
    entry: Any = orjson.loads((OLD / "episode.jsonl").read_bytes())
    inner = entry
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(orjson.dumps(entry))
    with pytest.raises(ConfigError, match=rf"episodes\.jsonl:1: not an episode of this version: {said}"):
        list(read_episodes(file))


def test_an_episode_whose_journal_is_gone_is_named() -> None:
    (episode,) = read_episodes(OLD / "episode.jsonl")
    with pytest.raises(ConfigError, match=r"session 876ad.*: its journal '/data/state/.*keep its rollout\.state"):
        read_calls(episode)
