"""A real harness on a task of Harbor, whose state outside of the working directory decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.play import make, play, scripted
from tests.lifecycle.harbor_base import base_image
from tests.support.harbor_tasks import TASKS
from tests.support.requirements import need_node


@pytest.fixture(autouse=True)
def _docker(docker_host: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    need_node()
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    with base_image(docker_host):
        yield


@pytest.mark.parametrize(("commands", "reward"), [(None, 1.0), (["echo Hello > greet"], 0.0)])
def test_a_real_harness_is_graded_by_the_verifier(tmp_path: Path, commands: list[str] | None, reward: float) -> None:
    """The scripted policy plays the reference solution, or does something else. Naming the tasks names the rest."""
    engine = {} if commands is None else {"engine": scripted(commands)}
    env = make(tmp_path, harness="pi", tasks={"name": "harbor", "path": str(TASKS / "greet")}, **engine)
    try:
        got, terminated, _, episode = play(env)
    finally:
        env.close()
    assert episode.session.failure is None, episode.session.failure
    assert (got, terminated) == (reward, True), episode.evaluation
    assert episode.request.runtime.name == "docker"
    assert episode.evaluation is not None
    assert (episode.evaluation.evaluator, episode.evaluation.trust) == ("harbor", "low")
    assert episode.trajectory.fidelity.exact
