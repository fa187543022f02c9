"""Run real harnesses in sandboxes of providers, and cut their streams in the midst of model calls: `make show-remote`.

NeMo Gym 0.7's own `docker`, `apptainer` and `local`, a machine behind SSH whose network has no route, and a provider
of the tests that follows NeMo Gym's protocol, in sessions and behind an HTTP proxy. `local` isolates nothing: it shows
the transport and the reward. The policy plays the reference solutions. The program runs in NeMo Gym's environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from argparse import BooleanOptionalAction
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import docker
from rich.console import Console
from rich.table import Table

from polar_gym.config.loading import load_config
from polar_gym.gateway.node.assemble import load_tasks, make_node, make_request
from polar_gym.harnesses import HARNESSES
from polar_gym.harnesses.install import toolchain_mounts
from polar_gym.paths import cache_dir
from polar_gym.runtimes import HOME, RUNTIMES, TOOLCHAIN, Command, SandboxError, agent, remote, skeleton
from polar_gym.runtimes.conformance import examine, render
from polar_gym.runtimes.laws import LAWS as SANDBOX_LAWS
from polar_gym.runtimes.laws import Trial
from polar_gym.runtimes.relay.link import Stream
from polar_gym.schema import Episode, RuntimeSpec
from tests.e2e.nemo_gym import INSTALL, installed, venv_directory
from tests.e2e.vllm_server import CHECKOUT
from tests.show.result import Result, make_parser, parse
from tests.support import apptainer, sandbox_provider, ssh_host
from tests.support.docker_daemon import own_daemon, running_daemon

REWARDED, UNDISTURBED, CUT, APART, HONEST, PROMISED = LAWS = (
    "every session has the reward 1.0, also where its streams are cut",
    "a session whose streams are cut has as many calls and tokens as one whose streams are whole",
    "requests and answers of model calls were cut in their midst",
    "a sandbox reaches nothing but its gateway, and its agent has no rights, unless its provider isolates nothing",
    "where a provider isolates nothing, every evaluation says so",
    "every law of a sandbox holds, except those that a provider cannot keep",
)
ISOLATION = ("reaches nothing else", "no rights")
HARNESS = ("pi", "codex")
MACHINES = ("ssh", "local")
"""Providers whose sandboxes are a user of a machine."""
LIMITS = {"processes are limited", "memory is limited"}
OF_A_MACHINE = {*LIMITS, "sandboxes are apart", "mounts are read-only", "stop leaves nothing"}
WITHOUT = {
    "boxes": {"processes are limited"},
    "routed": {"processes are limited", "nor does a killed gateway"},
    "apptainer": LIMITS,
    "ssh": OF_A_MACHINE,
    "local": {*OF_A_MACHINE, "nor does a killed gateway"},
}
"""The laws that cannot hold: the protocol limits no processes, `routed` and `local` find no sandbox of another process,
apptainer's memory needs systemd's control groups, and a machine that is shared has one sandbox at a time. Its user owns
its mounts and shares /tmp."""
VERSION = "0.7.0"
HIDE = f"""
set -e
made=
for each in {HOME} {TOOLCHAIN}; do
    [ -d $each ] || {{ mkdir -p $each; made="$made $each"; }}
    mount -t tmpfs -o mode=0755 tmpfs $each
done
code=0
"$@" || code=$?
umount {HOME} {TOOLCHAIN}
[ -z "$made" ] || rmdir $made
exit $code
"""
"""The script that runs a program for which the directories are empty that a sandbox on this machine must find empty. It
leaves none that it made: `runtime=unconfined` would not start there."""


class Cuts:
    """Which requests and answers are cut: each second one, since a stream's successor brings it again."""

    def __init__(self) -> None:
        self.seen = {"request": 0, "answer": 0}

    def due(self, what: str) -> bool:
        self.seen[what] += 1
        return self.seen[what] % 2 == 0


class CutStream:
    """A stream that is lost in the midst of some requests (which it reads) and answers (which it is to write)."""

    def __init__(self, whole: Stream, cuts: Cuts) -> None:
        self._whole = whole
        self._cuts = cuts
        self._lost = False

    async def read(self) -> bytes:
        data = b"" if self._lost else await self._whole.read()
        if b"POST /" in data and self._cuts.due("request"):
            data = data[: data.index(b"POST /") + 100]
            await self._lose()
        return data

    async def write(self, data: bytes) -> None:
        if b"HTTP/1.1 200 OK" in data and self._cuts.due("answer"):
            await self._whole.write(data[: data.index(b"HTTP/1.1 200 OK") + 100])
            await self._lose()
        if self._lost:
            raise OSError("the stream was cut")
        await self._whole.write(data)

    async def close(self) -> None:
        await self._whole.close()

    async def _lose(self) -> None:
        self._lost = True
        await self._whole.close()


@contextlib.contextmanager
def cutting() -> Iterator[Cuts]:
    """Have all streams of this process cut."""
    cuts, stream = Cuts(), remote.stream

    def cut_stream(*arguments: Any) -> tuple[Callable[..., Any], int]:
        connect, web = stream(*arguments)

        async def connect_cut(*where: Any) -> CutStream:
            return CutStream(await connect(*where), cuts)

        return connect_cut, web

    with mock.patch.object(remote, "stream", cut_stream):
        yield cuts


@contextlib.contextmanager
def boxes() -> Iterator[dict[str, Any]]:
    yield {"provider": "boxes"}


@contextlib.contextmanager
def of_docker() -> Iterator[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        host = running_daemon() or stack.enter_context(own_daemon())
        stack.enter_context(mock.patch.dict(os.environ, DOCKER_HOST=host))
        with contextlib.closing(docker.DockerClient(base_url=host)) as client:
            skeleton.import_skeleton(client, tag := skeleton.skeleton_tag())
        volumes = ["/usr:/usr:ro", *(f"{path.resolve()}:{path}:ro" for path in agent.host_etc())]
        config = {"create": {"use_init": False}}  # the image's /sbin is a link, at which Docker has no init
        yield {"provider": "docker", "image": tag, "options": {"volumes": volumes}, "config": config}


@contextlib.contextmanager
def of_apptainer() -> Iterator[dict[str, Any]]:
    """Its image is a directory: the skeleton, with the machine's /usr."""
    program = Path(apptainer.program())
    with tempfile.TemporaryDirectory(prefix="polar-gym-image-") as directory:
        files, image = f"{directory}/files", f"{directory}/image"
        with tarfile.open(fileobj=BytesIO(skeleton.skeleton())) as tar:
            tar.extractall(files, filter="tar")
        build = [program, "build", "--sandbox", image, files]
        subprocess.run(build, check=True, capture_output=True)
        binds = ["/usr:/usr:ro", *(f"{path.resolve()}:{path}:ro" for path in agent.host_etc())]
        config = {"create": {"apply_resource_limits": False}}  # they need systemd's control groups
        with mock.patch.dict(os.environ, PATH=f"{program.parent}:{os.environ['PATH']}"):
            yield {"provider": "apptainer", "image": image, "options": {"binds": binds}, "config": config}


@contextlib.contextmanager
def of_ssh() -> Iterator[dict[str, Any]]:
    with ssh_host.ssh_host() as host:
        yield {"provider": "ssh", "config": host.config, "workspace": {"path": ssh_host.WORKSPACE}}


@contextlib.contextmanager
def of_local() -> Iterator[dict[str, Any]]:
    yield {"provider": "local", "accept_no_isolation": True}


@contextlib.contextmanager
def routed() -> Iterator[dict[str, Any]]:
    yield {"provider": "routed"}


PLACES = {
    "boxes": boxes,
    "routed": routed,
    "docker": of_docker,
    "apptainer": of_apptainer,
    "ssh": of_ssh,
    "local": of_local,
}


async def sessions(harness: str, runtime: dict[str, Any], tasks: int) -> list[Episode]:
    """Return the episodes of a harness on the first tasks of the demo, one after the other."""
    with tempfile.TemporaryDirectory(prefix="polar-gym-remote-") as state:
        settings = {"harness": harness, "runtime": runtime, "rollout": {"state": state, "timeout_seconds": 300}}
        config = load_config("demo", settings=settings)
        chosen = load_tasks(config)[:tasks]
        async with make_node(config, chosen) as node:
            return [await node.rollout(make_request(config, task)) for task in chosen]


async def starts(spec: RuntimeSpec, count: int) -> list[float]:
    """Return the seconds until each of so many sandboxes with Pi had run its first command, in order."""
    runtime, seconds = RUNTIMES.make(spec), []
    mounts, executable = await asyncio.to_thread(toolchain_mounts, HARNESSES.get("pi"), cache_dir())
    for number in range(count):
        begun = time.monotonic()
        async with Trial(runtime, spec, Path("/nowhere")).sandbox(f"start-{number}", mounts=mounts) as box:
            done = await box.exec(Command(argv=[*executable, "--version"], workdir="/"))
            seconds.append(time.monotonic() - begun)
            assert done.exit_code == 0, done.stderr
    await runtime.close()
    return seconds


async def show(name: str, options: Any, result: Result) -> tuple[list[str], dict[str, str]]:
    """Return the row of a provider, and the problem with each law of a sandbox that was tried, "" where it holds."""
    harnesses, count, tasks = options.harness, options.starts, options.tasks
    with PLACES[name]() as place:
        runtime = {"name": "remote", **place}
        spec = RuntimeSpec.model_validate(runtime)
        found = await examine(spec, tuple(SANDBOX_LAWS) if options.laws else ISOLATION)
        first, *later = await starts(spec, count)
        later.sort()
        figures = result.figures[name] = {"laws": found, "first start": first, "starts": later}
        cells = {}
        for harness in harnesses:
            whole = await sessions(harness, runtime, tasks)
            with cutting() as cuts:
                cut = await sessions(harness, runtime, tasks)
            lost = sum(seen // 2 for seen in cuts.seen.values())
            cells[harness] = [told(whole), f"{told(cut)}, {lost} cuts"]
            figures[harness] = {"whole": told(whole), "cut": told(cut), "seen": cuts.seen}
            wrong = [each for each in (*whole, *cut) if each.reward != 1.0]
            result.check(REWARDED, [f"{name} {harness}: {each.reward} {each.session.failure}" for each in wrong])
            same = [counts(each) for each in whole], [counts(each) for each in cut]
            result.check(UNDISTURBED, [f"{name} {harness}: {same}"] if same[0] != same[1] else [])
            uncut = [what for what, seen in cuts.seen.items() if seen < 2]
            result.check(CUT, [f"{name} {harness}: no {what} was cut" for what in uncut])
            trusted = [each.evaluation.trust for each in (*whole, *cut) if each.evaluation is not None]
            expected = "low" if name in MACHINES else "high"
            result.check(HONEST, [f"{name} {harness}: {trusted}"] if set(trusted) != {expected} else [])
    broken = [f"{name}, {law}: {found[law]}" for law in ISOLATION if found[law]]
    result.check(APART, [] if name == "local" else broken)
    if options.laws:
        kept = [law for law in found if law not in (*ISOLATION, *WITHOUT.get(name, ()))]
        result.check(PROMISED, [f"{name}, {law}: {found[law]}" for law in kept if found[law]])
    said = "only its gateway" if not broken else "NOTHING is isolated"
    p50, p99 = (later[min(len(later) - 1, int(len(later) * part))] for part in (0.5, 0.99))
    figures = (f"{first:.1f}", f"{p50:.2f}", f"{p99:.2f}")
    return [name, said, *figures, *(cell for both in cells.values() for cell in both)], found


def counts(episode: Episode) -> tuple[int, int]:
    """Return the calls and the sampled tokens of an episode."""
    return episode.trajectory.fidelity.calls, episode.trajectory.fidelity.sampled_tokens


def told(episodes: Sequence[Episode]) -> str:
    rewards = dict.fromkeys("none" if each.reward is None else f"{each.reward:g}" for each in episodes)
    timings = [each.session.timing for each in episodes]
    stages = ("init", "running", "evaluating")
    means = [sum(getattr(each, stage) or 0.0 for each in timings) / len(timings) for stage in stages]
    return f"{' or '.join(rewards)} ({' + '.join(f'{mean:.0f}' for mean in means)} s)"


async def show_all(options: Any, result: Result) -> list[Table]:
    """Return the table of rewards and starts, and that of the laws of a sandbox."""
    columns = [part for harness in options.harness for part in (harness, f"{harness}, cut")]
    heads = ("provider", "sandbox reaches", "first start (s)", "p50", "p99", *columns)
    rewards = Table(*heads, title="Rewards (seconds of preparation + run + grading), start-up with Pi", show_lines=True)
    tried = []
    with tempfile.TemporaryDirectory() as directory, sandbox_provider.installed(Path(directory) / "installed"):
        for name in options.provider:
            try:
                row, found = await show(name, options, result)
            except SandboxError as error:
                result.check(REWARDED, [f"{name}: {error}"])
                continue
            rewards.add_row(*row)
            tried.append((name, found))
    return [rewards, render(tried)]


def main() -> int:
    parser = make_parser(
        "remote",
        __doc__,
        quick="sessions of the tests' provider, apptainer, local, codex, a second task, most starts, and most laws",
    )
    parser.add_argument("--provider", action="append", choices=PLACES, help="only this one; may be given repeatedly")
    parser.add_argument("--harness", action="append", choices=HARNESS, help="only this one; may be given repeatedly")
    parser.add_argument("--starts", type=int, default=21, help="sandboxes to start (default: %(default)s)")
    parser.add_argument("--tasks", type=int, default=2, help="tasks of the demo (default: %(default)s)")
    parser.add_argument("--laws", action=BooleanOptionalAction, default=True, help="try all laws of a sandbox")
    parser.set_defaults(provider=list(PLACES), harness=HARNESS)
    quick = {"provider": ["routed", "docker", "ssh"], "harness": ["pi"], "starts": 4, "tasks": 1, "laws": False}
    options = parse(parser, quick=quick)
    if not installed(VERSION):
        parser.error(f"NeMo Gym {VERSION} is missing; install it with: {INSTALL}")
    if Path(sys.prefix) != venv_directory(VERSION):
        python = str(venv_directory(VERSION) / "bin" / "python")
        hidden = ("unshare", "--mount", "sh", "-c", HIDE, "sh") if "local" in options.provider else ("env",)
        environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
        os.execvpe(hidden[0], [*hidden, python, "-m", "tests.show.remote", *sys.argv[1:]], environment)
    result = Result("remote", LAWS if options.laws else LAWS[:-1], options)
    for each in asyncio.run(show_all(options, result)):
        Console(width=160).print(each)
    return result.finish()


if __name__ == "__main__":
    sys.exit(main())
