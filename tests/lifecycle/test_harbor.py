"""Tasks of Harbor on a real Docker daemon: how images are built, and what a verifier's verdict is worth."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from polar_gym.curation.bench import Bench
from polar_gym.curation.validation import validate
from polar_gym.gateway.node.node import Node
from polar_gym.runtimes import Command, LeftoverError, SandboxError, WholeSandbox
from polar_gym.runtimes.docker.builds import build
from polar_gym.runtimes.docker.images import KEPT
from polar_gym.runtimes.docker.sandbox import DockerSandbox
from polar_gym.schema import Episode, EvaluatorSpec, HarnessSpec, RuntimeSpec
from polar_gym.tasks import Task
from tests.lifecycle.grading_bench import lose_one_read
from tests.lifecycle.harbor_base import base_image
from tests.lifecycle.images import imported
from tests.support.harbor_tasks import BASE, TASKS, write_task
from tests.support.sessions import node
from tests.support.task_files import load, request_for

DOCKER = RuntimeSpec(name="docker")

ASK = (
    "wget -q -O /dev/null --header \"Authorization: Bearer $OPENAI_API_KEY\" --header 'Content-Type: application/json' "
    '--post-data \'{"model": "policy", "messages": [{"role": "user", "content": "x"}]}\' '
    '"$OPENAI_BASE_URL/chat/completions"; '
)
"""Shell commands of a call of the policy: after it, what a harness does is its own doing."""

REWARD = "/logs/verifier/reward.txt"


@pytest.fixture
def host(docker_host: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("DOCKER_HOST", docker_host)
    with base_image(docker_host):
        yield docker_host


@pytest.fixture
async def local(host: str, tmp_path: Path) -> AsyncIterator[Node]:
    async with node(tmp_path) as local:
        yield local
    with contextlib.closing(docker.DockerClient(base_url=host)) as client:
        assert not client.images.list(name=KEPT), "a copy of a harness's files is left"


def task_in(directory: Path, **files: str) -> Task:
    (task,) = load("harbor", path=write_task(directory, **files))
    return task


async def run(local: Node, task: Task, commands: str, **options: Any) -> Episode:
    """Return the episode of a harness that asks once and then runs these shell commands."""
    request = request_for(
        task,
        runtime=RuntimeSpec.model_validate({"name": "docker", **options}),
        evaluator=EvaluatorSpec(name="harbor"),
        agent=HarnessSpec.model_validate({"name": "command", "command": ASK + commands}),
    )
    return await local.rollout(request)


def detail(episode: Episode) -> str:
    assert episode.session.failure is None, episode.session.failure
    assert episode.evaluation is not None
    assert episode.evaluation.trust == "low" or episode.evaluation.reward == 0
    return episode.evaluation.detail


# verdicts -------------------------------------------------------------------------------------------------------------


async def test_the_reference_solutions_are_rewarded_and_doing_nothing_is_not(host: str, tmp_path: Path) -> None:
    async with Bench(DOCKER, tmp_path) as bench:
        verdicts = [await validate(task, bench) for task in load("harbor", path=TASKS)]
    assert [verdict.problem for verdict in verdicts] == ["", "", ""]
    assert [verdict.gold and verdict.gold.reward for verdict in verdicts] == [1, 1, 1]
    assert [verdict.no_op and verdict.no_op.reward for verdict in verdicts] == [0, 0, 0]
    greet, _, count = (verdict.gold for verdict in verdicts)
    assert greet is not None
    assert greet.log == "asked in /work as 0\n"
    assert count is not None
    assert count.components == {"reward": 1, "right": 1, "alone": 1}


async def test_the_harness_is_root_in_the_task_s_directory_and_sees_no_tests(local: Node) -> None:
    greet = next(task for task in load("harbor", path=TASKS) if task.instance_id == "polar/greet")
    install = "printf '#!/bin/sh\\necho \"Hello, $1!\"' > /usr/local/bin/greet; chmod +x /usr/local/bin/greet"
    episode = await run(local, greet, f"id -u; pwd; ls /tests /solution; {install}")
    assert episode.reward == 1, detail(episode)
    assert episode.artifacts.stdout == "0\n/work\n"
    assert "/tests: No such file" in episode.artifacts.stderr


async def test_a_wrong_solution_gets_the_verifier_s_reward_and_each_of_its_numbers(local: Node) -> None:
    (count,) = load("harbor", path=TASKS / "word-count")
    episode = await run(local, count, "echo 5 words > count.txt")
    assert episode.reward == 0
    assert episode.evaluation is not None
    assert episode.evaluation.components == {"reward": 0, "right": 1, "alone": 0}


FORGERIES = {
    "plants the tests and the reward": "mkdir -p /tests /logs/verifier && printf '#!/bin/sh' > /tests/test.sh && "
    f"echo 1 > {REWARD}",
    "leaves a process that writes the reward": f"(while :; do mkdir -p /logs/verifier; echo 1 > {REWARD}; done) & ",
}


@pytest.mark.parametrize("how", FORGERIES)
async def test_what_is_forged_before_the_verifier_starts_is_gone(local: Node, tmp_path: Path, how: str) -> None:
    episode = await run(local, task_in(tmp_path), FORGERIES[how])
    assert episode.reward == 0
    assert detail(episode) == "the verifier wrote the reward 0"


BREAKS = {
    "removes every program": "rm -rf /bin/*",
    "kills all processes": "kill -9 1; kill -9 -1",
    "makes the verifier hang": "touch hang",
    "makes the verifier write nonsense": "touch nonsense",
    "makes the verifier write nothing": "touch nothing",
    "leaves more than the disk's limit": "head -c 3000000 /dev/zero > big",
}
BREAKABLE = f"""#!/bin/sh
[ ! -f hang ] || sleep 600
[ ! -f nothing ] || exit 1
[ ! -f nonsense ] || {{ echo nan > {REWARD}; exit; }}
echo 0 > {REWARD}
"""


@pytest.mark.parametrize("how", BREAKS)
async def test_a_harness_cannot_buy_a_mask_by_breaking_its_grading(local: Node, tmp_path: Path, how: str) -> None:
    task = task_in(tmp_path, test=BREAKABLE, toml="[verifier]\ntimeout_sec = 3\n")
    episode = await run(local, task, BREAKS[how], disk_mb=2)
    assert episode.session.failure is None, episode.session.failure
    assert episode.reward == 0
    assert detail(episode)


async def test_a_container_that_is_lost_while_the_reward_is_read_is_graded_again(
    local: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = lose_one_read(monkeypatch, DockerSandbox, "/reward.json")
    episode = await run(local, task_in(tmp_path, test=f"#!/bin/sh\necho 1 > {REWARD}\n"), "true")
    assert len(lost) == 1
    assert episode.reward == 1, detail(episode)


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ("sleep 600", "the verifier timed out after 5 s"),
        ("exit 3", "the verifier exited with 3, and wrote neither /logs/verifier/reward.json nor"),
        ("echo '[1]' > /logs/verifier/reward.json", "reward.json holds no finite number: '[1]'"),
    ],
)
async def test_a_broken_verifier_masks_in_one_line(host: str, tmp_path: Path, test: str, said: str) -> None:
    task = task_in(tmp_path, test=f"#!/bin/sh\n{test}\n", toml="[verifier]\ntimeout_sec = 5\n")
    async with Bench(DOCKER, tmp_path) as bench:
        problem = (await validate(task, bench)).problem
    assert said in problem
    assert "; and without the harness's changes: the verifier" in problem
    assert "\n" not in problem


async def test_a_solution_that_fails_is_named(host: str, tmp_path: Path) -> None:
    async with Bench(DOCKER, tmp_path) as bench:
        verdict = await validate(task_in(tmp_path, solve="#!/bin/sh\necho no tool >&2; exit 4\n"), bench)
    assert verdict.problem.endswith("the verifier wrote the reward 0; solve.sh exited with 4: no tool")


# containers -----------------------------------------------------------------------------------------------------------


async def test_a_node_that_died_leaves_no_copy_of_files(host: str, tmp_path: Path) -> None:
    async with Bench(DOCKER, tmp_path) as bench, bench.sandbox(task_in(tmp_path)) as sandbox:
        assert isinstance(sandbox, WholeSandbox)
        name = await sandbox.keep()
        with contextlib.closing(docker.DockerClient(base_url=host)) as client:
            (session,) = [client.images.get(name).labels["polar-gym.session"]]
            async with node(tmp_path / "other") as other:
                await other.runtime(DOCKER).reap([session])
            assert not client.images.list(name=KEPT)


async def test_a_copy_that_comes_too_late_is_removed(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stayed until the next start of a node: nobody knew its name when it came."""
    monkeypatch.setattr("polar_gym.runtimes.docker.sandbox.COPY_SECONDS", 0)
    async with Bench(DOCKER, tmp_path) as bench, bench.sandbox(task_in(tmp_path)) as sandbox:
        assert isinstance(sandbox, WholeSandbox)
        with pytest.raises(SandboxError, match=r"docker commit of the 0 MiB that .* is not done within 0 s"):
            await sandbox.keep()
        for thread in threading.enumerate():
            if thread.name.startswith(KEPT):
                await asyncio.to_thread(thread.join)
        with contextlib.closing(docker.DockerClient(base_url=host)) as client:
            assert not client.images.list(name=KEPT)


async def test_a_copy_that_comes_too_late_masks(local: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a reward of 0 for a daemon that is slow."""
    monkeypatch.setattr("polar_gym.runtimes.docker.sandbox.COPY_SECONDS", 0)
    monkeypatch.setattr("polar_gym.runtimes.docker.sandbox.COPY_RATE", 10**12)
    episode = await run(local, task_in(tmp_path), "head -c 3000000 /dev/zero > big")
    for thread in threading.enumerate():
        if thread.name.startswith(KEPT):
            await asyncio.to_thread(thread.join)
    assert episode.reward is None
    assert episode.session.failure is not None
    assert episode.session.failure.kind == "runtime_error"
    assert "docker commit of the 3 MiB that the harness left is not done within 0 s" in episode.session.failure.message


async def test_files_that_take_long_to_copy_are_the_agents_doing(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an agent that masks its session by millions of files: a container without them is copied, too."""
    copy, asked = DockerSandbox._copy, list[str]()

    def slow(self: DockerSandbox, container: str, image: str, seconds: float) -> None:
        asked.append(container)
        copy(self, container, image, 0 if len(asked) == 1 else seconds)

    monkeypatch.setattr(DockerSandbox, "_copy", slow)
    async with Bench(DOCKER, tmp_path) as bench, bench.sandbox(task_in(tmp_path)) as sandbox:
        assert isinstance(sandbox, WholeSandbox)
        with pytest.raises(LeftoverError, match=r"docker commit of the 0 MiB that .* is not done within 600 s"):
            await sandbox.keep()
        assert len(asked) == 2
        for thread in threading.enumerate():
            if thread.name.startswith(KEPT):
                await asyncio.to_thread(thread.join)
        with contextlib.closing(docker.DockerClient(base_url=host)) as client:
            assert not client.images.list(name=KEPT)
            assert not client.containers.list(all=True, filters={"name": asked[1]})


async def test_a_copy_of_many_bytes_has_more_time(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against one limit for all sandboxes, which the copy of a large one exceeds on a slow disk."""
    monkeypatch.setattr("polar_gym.runtimes.docker.sandbox.COPY_SECONDS", 0)
    monkeypatch.setattr("polar_gym.runtimes.docker.sandbox.COPY_RATE", 1000)
    async with Bench(DOCKER, tmp_path) as bench, bench.sandbox(task_in(tmp_path)) as sandbox:
        assert isinstance(sandbox, WholeSandbox)
        await sandbox.exec(Command(argv=["sh", "-c", "head -c 3000000 /dev/zero > big"]))
        assert (await sandbox.keep()).startswith(KEPT)


REFUSED = {
    "USER 9": "is made for another user than root; set USER root in it",
    "VOLUME /data": "has VOLUME /data, whose files would not be graded; make it without VOLUME",
}
"""A change of an image -> why its files cannot be graded. `docker commit` leaves the files of volumes out."""


@pytest.mark.parametrize("change", REFUSED)
async def test_an_image_whose_files_cannot_be_graded_is_refused(host: str, tmp_path: Path, change: str) -> None:
    with imported(host, {"root/.keep": ""}, changes=[change]) as image:
        task = task_in(tmp_path).model_copy(update={"image": image})
        async with Bench(DOCKER, tmp_path) as bench:
            problem = (await validate(task, bench)).problem
    assert REFUSED[change] in problem


# builds ---------------------------------------------------------------------------------------------------------------


async def test_an_image_is_built_once_for_each_content(host: str, tmp_path: Path) -> None:
    """However many ask at once; a new content, mode or argument is another image."""
    task = write_task(
        tmp_path, dockerfile=f"FROM {BASE}\nARG WORD\nRUN cat /proc/sys/kernel/random/uuid > /id\nWORKDIR /w\n"
    )

    def built(**arguments: str) -> str:
        return build(host, task / "environment", arguments=arguments, network="none", seconds=120)

    with contextlib.closing(docker.DockerClient(base_url=host)) as client:
        tags = await asyncio.gather(*(asyncio.to_thread(built) for _ in range(4)))
        ids = {client.images.get(tag).id for tag in tags}
        assert len(set(tags)) == len(ids) == 1
        assert built(WORD="x") != tags[0]
        (task / "environment/Dockerfile").chmod(0o755)
        assert built() != tags[0]
        assert client.images.get(tags[0]).id in ids


async def test_a_broken_dockerfile_is_one_line_with_the_last_lines_of_the_build(host: str, tmp_path: Path) -> None:
    task = task_in(tmp_path, dockerfile=f"FROM {BASE}\nRUN echo wanted: a compiler && exit 7\nWORKDIR /work\n")
    async with Bench(DOCKER, tmp_path) as bench:
        problem = (await validate(task, bench)).problem
    assert problem.startswith(f"runtime.image: docker build {tmp_path}/task/environment exited with ")
    assert "wanted: a compiler" in problem
    assert "\n" not in problem


async def test_a_build_ends_at_its_time_limit(host: str, tmp_path: Path) -> None:
    task = write_task(tmp_path, dockerfile=f"FROM {BASE}\nRUN echo begun && sleep 3600\n")
    with pytest.raises(SandboxError, match="is not done within 3 s: "):
        await asyncio.to_thread(build, host, task / "environment", arguments={}, network="none", seconds=3)


async def test_limits_and_variables_are_those_of_the_task(host: str, tmp_path: Path) -> None:
    toml = "[environment]\nmemory_mb = 77\ncpus = 0.5\n[environment.env]\nWHO = 'me'\n"
    async with Bench(DOCKER, tmp_path) as bench, bench.sandbox(task_in(tmp_path, toml=toml)) as sandbox:
        said = await sandbox.exec(Command(argv=["sh", "-c", "echo $WHO; id -u; cat /sys/fs/cgroup/memory.max || true"]))
        with contextlib.closing(docker.DockerClient(base_url=host)) as client:
            limits = [each.attrs["HostConfig"] for each in client.containers.list()]
    assert said.stdout.decode().startswith("me\n0\n")
    assert {(each["Memory"], each["NanoCpus"]) for each in limits} >= {(77 * 2**20, 5 * 10**8)}
