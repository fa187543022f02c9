"""Real CLIs on environments that ship with NeMo Gym: their rewards are those of NeMo Gym's own agent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.gym_environments import Case, cases, gyms_own, ours, serving_environments
from tests.e2e.nemo_gym import INSTALL, installed
from tests.support.requirements import need, need_bubblewrap, need_node

VERSION = "0.7.0"
ENVIRONMENTS = ("example_session_state_mgmt", "math_advanced_calculations")
"""One whose server keeps a state for each session, and one whose verifier reads what the tools said."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Case], dict[str, str]]]:
    need(installed(VERSION), f"NeMo Gym {VERSION}", INSTALL)
    need_node()
    need_bubblewrap()
    chosen = cases(VERSION, ENVIRONMENTS)
    with serving_environments(VERSION, chosen, tmp_path_factory.mktemp("gym")) as urls:
        yield chosen, urls


@pytest.mark.parametrize("harness", [{"name": "codex"}, {"name": "claude_code", "profile": "lean"}], ids=str)
async def test_rewards_are_those_of_nemo_gyms_own_agent(
    served: tuple[list[Case], dict[str, str]], harness: dict[str, str], tmp_path: Path
) -> None:
    """Two sessions at once of each case: a counter that they shared would be wrong."""
    chosen, urls = served
    for case in chosen:
        expected = await gyms_own(case, urls)
        assert expected == (1.0 if case.conversation == "right" else 0.0), case.name
        for episode in await ours(case, urls, tmp_path, harness, samples=2):
            assert episode.reward == expected, (case.name, episode.session.failure, episode.evaluation)
            assert episode.trajectory.fidelity.breaks == [], case.name
