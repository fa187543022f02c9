"""A sandbox reaches its own session's gateway at 127.0.0.1:8080, and nothing else."""

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import docker
import pytest

from polar_gym.runtimes import Command, Mount, Runtime, Sandbox
from polar_gym.runtimes.kernel.listener import listen_inside
from polar_gym.schema import RuntimeSpec
from tests.lifecycle.runtime_kinds import (
    MakeRuntime,
    ask_gateway,
    gateway,
    host_python,
    make,
    make_runtime,
    runtime,
    sh,
    started,
)
from tests.support import apptainer
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need, need_a_checkout_that_all_may_read, need_program

__all__ = ["docker_host", "make_runtime", "runtime"]

PROBE = """
import json, socket, sys
def attempt(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(3)
        return probe.connect_ex(tuple(address) if isinstance(address, list) else address)
print(json.dumps([attempt(*target) for target in json.loads(sys.argv[1])]))
"""
"""Prints for each of its targets the error number of a connection attempt; 0 is a success."""

ASK_AT_ONCE = """
import concurrent.futures, json, urllib.request
def ask(_):
    return len(urllib.request.urlopen("http://127.0.0.1:8080/", timeout=20).read())
print(json.dumps(list(concurrent.futures.ThreadPoolExecutor(8).map(ask, range(8)))))
"""

OUTSIDE = [socket.AF_INET, ["192.0.2.1", 80]]


async def probe_inside(sandbox: Sandbox, targets: list[Any]) -> list[int]:
    result = await sandbox.exec(Command(argv=["python3", "-c", PROBE, json.dumps(targets)]))
    assert result.exit_code == 0, result.stderr.decode()
    return json.loads(result.stdout)


def probe_host(targets: list[Any]) -> list[int]:
    return json.loads(subprocess.check_output([sys.executable, "-c", PROBE, json.dumps(targets)], timeout=60))


@pytest.fixture
async def host_targets(tmp_path: Path) -> AsyncIterator[list[Any]]:
    """Listeners on every kind of address of this machine: loopback, network, abstract, and a socket file."""

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    abstract = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    abstract.bind(f"\0polar-gym-test-{os.getpid()}")
    file = f"/tmp/polar-gym-test-{os.getpid()}.sock"
    async with AsyncExitStack() as stack:
        targets: list[Any] = []
        for address in {"127.0.0.1", *network_addresses()}:
            server = await stack.enter_async_context(await asyncio.start_server(greet, address, 0))
            targets.append([socket.AF_INET, [address, server.sockets[0].getsockname()[1]]])
        await stack.enter_async_context(await asyncio.start_unix_server(greet, sock=abstract))
        await stack.enter_async_context(await asyncio.start_unix_server(greet, file))
        Path(file).chmod(0o666)
        stack.callback(Path(file).unlink, missing_ok=True)
        targets += [[socket.AF_UNIX, f"\0polar-gym-test-{os.getpid()}"], [socket.AF_UNIX, file]]
        yield targets


def network_addresses() -> list[str]:
    """The machine's address on the network, where it has one; connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if probe.connect_ex(("192.0.2.1", 9)) != 0:
            return []
        return [probe.getsockname()[0]]


async def test_only_the_own_gateway_is_reachable(runtime: Runtime, host_targets: list[Any]):
    reachable_on_host = await asyncio.to_thread(probe_host, host_targets)
    assert reachable_on_host == [0] * len(host_targets), "the probe itself is broken"
    async with (
        started(runtime, session_id="a", serve=gateway("gateway of a")) as a,
        started(runtime, session_id="b", serve=gateway("gateway of b")) as b,
    ):
        assert await asyncio.gather(ask_gateway(a), ask_gateway(b)) == ["gateway of a", "gateway of b"]
        errors = await probe_inside(a, [*host_targets, OUTSIDE])
        assert 0 not in errors
        assert errors[-1] == errno.ENETUNREACH, "there is a route to the outside"
        interfaces = await sh(a, "tail -n +3 /proc/net/dev | cut -d: -f1; tail -n +2 /proc/net/route")
        assert interfaces.stdout.split() == [b"lo"]


async def test_grading_has_no_network_at_all(runtime: Runtime, host_targets: list[Any]):
    async with started(runtime) as sandbox:
        own = [socket.AF_INET, ["127.0.0.1", 8080]]
        errors = await probe_inside(sandbox, [own, *host_targets, OUTSIDE])
    assert errors[0] == errno.ECONNREFUSED
    assert 0 not in errors


async def test_none_keeps_even_the_gateway_out(runtime: Runtime, host_targets: list[Any]):
    spec = RuntimeSpec(name="any", network="none")
    async with started(runtime, spec=spec, serve=gateway("not to be heard")) as sandbox:
        errors = await probe_inside(sandbox, [[socket.AF_INET, ["127.0.0.1", 8080]], *host_targets, OUTSIDE])
    assert errors[0] == errno.ECONNREFUSED
    assert 0 not in errors


@pytest.mark.parametrize("make_runtime", ["bubblewrap", "apptainer"], indirect=True)
async def test_full_without_a_daemon_is_the_machines_own_network(make_runtime: MakeRuntime, host_targets: list[Any]):
    """The machine's loopback included; its files stay out of sight, a socket among them too."""
    runtime = make_runtime()
    spec = RuntimeSpec(name="any", network="full")
    async with (
        started(runtime, spec=spec, session_id="a", serve=gateway("gateway of a")) as a,
        started(runtime, spec=spec, session_id="b", serve=gateway("gateway of b")) as b,
    ):
        assert a.base_url != b.base_url
        assert await asyncio.gather(ask_gateway(a), ask_gateway(b)) == ["gateway of a", "gateway of b"]
        *others, file = await probe_inside(a, host_targets)
        assert others == [0] * len(others)
        assert file == errno.ENOENT
    await runtime.close()


@pytest.fixture
def bridge(docker_host: str) -> Iterator[str]:
    """A Docker network: a daemon of the tests' own has none."""
    name = f"polar-gym-{os.getpid()}"
    with contextlib.closing(docker.DockerClient(base_url=docker_host)) as client:
        network = client.networks.create(name, driver="bridge")
        yield name
        network.remove()


async def test_full_in_docker_is_a_network_of_containers(docker_host: str, bridge: str, host_targets: list[Any]):
    """It reaches what the machine's address reaches, and other containers; the machine's loopback, where control ports
    are, stays closed."""
    runtime = make("docker", host=docker_host, bridge=bridge)
    spec = RuntimeSpec(name="docker", network="full")
    async with started(runtime, spec=spec, serve=gateway("gateway of a")) as sandbox:
        assert await ask_gateway(sandbox) == "gateway of a"
        errors = await probe_inside(sandbox, host_targets)
        routes = await sh(sandbox, "tail -n +2 /proc/net/route | cut -f1 | sort -u")
    for (family, address), error in zip(host_targets, errors, strict=True):
        reachable = family == socket.AF_INET and address[0] != "127.0.0.1"
        assert (error == 0) == reachable, (address, error)
    assert routes.stdout == b"eth0\n"
    await runtime.close()


async def test_gateway_serves_many_requests_and_commands(runtime: Runtime):
    async with started(runtime, serve=gateway("x" * 100_000)) as sandbox:
        for _ in range(2):
            result = await sandbox.exec(Command(argv=["python3", "-c", ASK_AT_ONCE]))
            assert json.loads(result.stdout) == [100_000] * 8


@pytest.mark.parametrize("relay", ["node", "python3"])
async def test_relay_where_the_namespace_is_closed(
    docker_host: str, tmp_path: Path, host_targets: list[Any], relay: str
):
    """The way in without setns, run by either program; the agent cannot end it, and it ends with the container."""
    nodes = [node for node in (Path("/usr/bin/node"), Path("/usr/local/bin/node")) if node.exists()]
    need(relay != "node" or nodes, "node", "apt-get install nodejs")
    no_program = tmp_path / "no-program"
    no_program.touch()
    hidden = [Mount(no_program, str(node)) for node in nodes if relay != "node"]
    scratch = Path(tempfile.mkdtemp(dir="/tmp"))  # not tmp_path: a socket's path must be short
    runtime = make("docker", host=docker_host, scratch=scratch, gateway="relay")
    async with started(runtime, session_id="s" * 200, mounts=hidden, serve=gateway("by relay")) as sandbox:
        running = await sh(sandbox, "cat /proc/[0-9]*/cmdline | tr '\\0' '\\n'")
        assert relay.encode() in running.stdout.splitlines()
        await sh(sandbox, "kill -9 -1", timeout_seconds=5)
        assert await ask_gateway(sandbox) == "by relay"
        assert json.loads((await sandbox.exec(Command(argv=["python3", "-c", ASK_AT_ONCE]))).stdout) == [8] * 8
        assert 0 not in await probe_inside(sandbox, [*host_targets, OUTSIDE])
    await runtime.close()
    scratch.rmdir()  # fails unless it is empty


NO_SETNS = """
import asyncio, json, sys
from polar_gym.runtimes import SandboxError
from tests.lifecycle.runtime_kinds import ask_gateway, gateway, make, started

async def main(**options):
    runtime = make("docker", host=sys.argv[1], **options)
    try:
        async with started(runtime, serve=gateway("by relay")) as sandbox:
            return await ask_gateway(sandbox)
    except SandboxError as error:
        return str(error)

print(json.dumps([asyncio.run(main()), asyncio.run(main(gateway="namespace"))]))
"""


async def test_gateway_that_may_not_join_namespaces_falls_back_to_the_relay(docker_host: str):
    """As in a container: root, but without the capability that setns asks for."""
    need_program("setpriv", "apt-get install util-linux")
    rights = ["setpriv", "--bounding-set=-sys_admin"] if os.geteuid() == 0 else []
    argv = [*rights, sys.executable, "-c", NO_SETNS, docker_host]
    outcome = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=600)
    assert outcome.returncode == 0, outcome.stderr
    answer, refusal = json.loads(outcome.stdout)
    assert answer == "by relay"
    assert "runtime.gateway=relay" in refusal


UNPRIVILEGED = """
import asyncio, json, os, sys
from pathlib import Path
from tests.lifecycle.runtime_kinds import Marked, ask_gateway, gateway, make, sh, started

async def main():
    options = json.loads(sys.argv[2])
    if "images" in options:
        options["images"] += f"-of-{os.geteuid()}"
    runtime = make(**options)
    if missing := runtime.check():
        return {"missing": missing}
    child = Marked()
    async with started(runtime, workspace=Path(sys.argv[3]), serve=gateway("without root")) as sandbox:
        answers = await asyncio.gather(ask_gateway(sandbox), ask_gateway(sandbox))
        identity = await sh(sandbox, "id -u; grep CapEff /proc/self/status; touch ~/f /tmp/f f && rm old && echo ok")
        refused = await sh(sandbox, "f=/proc/sys/vm/swappiness; value=$(cat $f); echo $value > $f")
        late = await sh(sandbox, f"setsid {child.command} & wait", timeout_seconds=0.5)
        await child.until(alive=False)
        await sh(sandbox, "mkdir -p ~/locked/in; chmod 000 ~/locked")
        scratch = sandbox.instance.scratch if hasattr(sandbox, "instance") else sandbox.scratch
    return {
        "answers": answers, "identity": identity.stdout.decode().split(), "sysctl": refused.exit_code,
        "timed_out": late.timed_out, "left": scratch.exists(), "uid": os.getuid(),
    }

if os.geteuid() == 0:
    asyncio.run(main())  # loads all modules while this user still may read them
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    os.chdir("/"); sys.executable = sys.argv[1]
print(json.dumps(asyncio.run(main())))
"""


@pytest.mark.parametrize("kind", ["bubblewrap", "apptainer"])
async def test_without_root(kind: str):
    """The owner's way into the namespaces, by a child that passes the socket back."""
    need_a_checkout_that_all_may_read()
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # not tmp_path: another user must get there
        Path(directory).chmod(0o777)
        options = _options_without_root(kind, Path(directory))
        (workspace := Path(directory, "workspace")).mkdir()
        (workspace / "old").touch()
        argv = [sys.executable, "-c", UNPRIVILEGED, host_python(), json.dumps(options), str(workspace)]
        outcome = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=600)
        assert outcome.returncode == 0, outcome.stderr
        assert (workspace / "old").exists()
    seen = json.loads(outcome.stdout)
    need(not seen.get("missing"), "user namespaces without root", str(seen.get("missing")))
    uid = seen.pop("uid")
    assert uid != 0
    assert seen.pop("sysctl") != 0
    assert seen == {
        "answers": ["without root"] * 2,
        "identity": ["1000" if kind == "bubblewrap" else str(uid), "CapEff:", "0" * 16, "ok"],
        "timed_out": True,
        "left": False,
    }


def _options_without_root(kind: str, directory: Path) -> dict[str, str]:
    if kind == "bubblewrap":
        need(make("bubblewrap").check() == [], "bubblewrap", "apt-get install bubblewrap")
        return {"kind": kind}
    return {
        "kind": kind,
        "program": apptainer.copy(apptainer.program(), directory / "apptainer"),
        "images": str(directory / "images"),
    }


async def test_listener_is_never_made_in_the_gateways_own_namespace():
    """A process number of another PID namespace may name a process of this one: its network is the host's."""
    with pytest.raises(PermissionError, match="no network namespace of its own"):
        await listen_inside(os.getppid(), 0)
