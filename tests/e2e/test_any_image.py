"""Real harnesses in apptainer, and in an image that has nothing: everything they need is mounted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from polar_gym.engines import ENGINES
from polar_gym.gateway.node.node import Node
from polar_gym.paths import cache_dir
from polar_gym.schema import Episode, HarnessSpec, PluginSpec, RuntimeSpec, TaskRequest
from tests.lifecycle.images import BUSYBOX_FILES, archive, imported
from tests.show.matrix import run, runtime_settings
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need_node

__all__ = ["docker_host"]


async def test_a_harness_solves_a_task_in_apptainer() -> None:
    need_node()
    with contextlib.ExitStack() as stack:
        episode = await run("pi", runtime_settings("apptainer", stack))
    assert episode.reward == 1.0, episode.session.failure
    assert episode.trajectory.fidelity.exact


@pytest.mark.parametrize("kind", ["docker", "apptainer"])
@pytest.mark.parametrize("harness", ["pi", "opencode"])
async def test_a_harness_works_in_an_image_with_nothing_but_busybox(
    docker_host: str, tmp_path: Path, kind: str, harness: str
) -> None:
    """Neither node, git nor libc is in it: pi is a program for node, opencode a native one that wants glibc."""
    need_node()
    with contextlib.ExitStack() as stack:
        tag = stack.enter_context(imported(docker_host, BUSYBOX_FILES, changes=["ENV PATH=/usr/bin:/bin"]))
        image = tag if kind == "docker" else archive(docker_host, tag, tmp_path / "image.tar")
        settings = {"host": docker_host} if kind == "docker" else runtime_settings(kind, stack)
        episode = await look_around(harness, RuntimeSpec.model_validate({**settings, "name": kind, "image": image}))
    assert episode.session.failure is None, episode.session.failure
    assert "busybox made this" in str(episode.trajectory.traces[0].messages)


async def look_around(harness: str, runtime: RuntimeSpec) -> Episode:
    """One session that runs one command."""
    script = {"match": "", "commands": ["busybox echo busybox made this"], "final_message": "Done."}
    spec: Any = PluginSpec.model_validate({"name": "embedded", "scripts": [script]})
    engine = ENGINES.get("embedded")(ENGINES.options(spec))
    request = TaskRequest(task_id="t", instruction="Look around.", runtime=runtime, agent=HarnessSpec(name=harness))
    async with Node(engine, cache=cache_dir()) as node:
        return await node.rollout(request)
