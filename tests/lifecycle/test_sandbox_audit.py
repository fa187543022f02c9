"""The probes of `polar-gym doctor --sandbox`: what they find in real sandboxes, and in sandboxes that were weakened."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import platform
import stat
import struct
import subprocess
import sys
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

import docker
import pytest
import typer

from polar_gym.cli.sandbox_audit import audit_sandboxes
from polar_gym.runtimes import Command, ExecResult, Runtime, Sandbox, SandboxRequest, bubblewrap
from polar_gym.runtimes.audit import GUARANTEES, LIMITS, PROBE, SECRET, Finding, audit, worse_than_docker
from polar_gym.runtimes.kernel import seccomp
from polar_gym.runtimes.skeleton import import_skeleton, skeleton_tag
from tests.lifecycle.gateway_users import Gateway, directory, gateway
from tests.lifecycle.runtime_kinds import host_python, make
from tests.support.docker_daemon import docker_host
from tests.support.requirements import need, need_a_checkout_that_all_may_read, need_bubblewrap, need_program
from tests.support.system_calls import numbers

__all__ = ["directory", "docker_host", "gateway"]

NAMES = {each.name for each in GUARANTEES}
MAY_BE_LOWER = {"disk"}
"""Depends on the disk of this machine."""
LOWER_WITHOUT_ROOT = {"uid", "memory", "processes"}
OLDER_DOCKERS_ALLOW = {
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "socket(AF_ALG)", "socket(AF_VSOCK)"),
    "set_mempolicy_home_node",
}

AUDIT = """
import asyncio, dataclasses, json, os, sys
from polar_gym.runtimes.audit import audit
from tests.lifecycle.runtime_kinds import make

async def findings(kind, options):
    runtime = make(kind, **options)
    if missing := runtime.check():
        return {"missing": missing}
    return {name: dataclasses.asdict(finding) for name, finding in (await audit(runtime)).items()}

request = json.loads(sys.argv[1])
check = make(request["kind"], **request["options"]).check
asyncio.run(asyncio.to_thread(check))  # loads all modules while this user still may read them
os.setgroups([]); os.setgid(request["uid"]); os.setuid(request["uid"])
os.chdir("/"); sys.executable = request["python"]
print(json.dumps(asyncio.run(findings(request["kind"], request["options"]))))
"""


def limits(*names: str) -> dict[str, int]:
    return {name: LIMITS[name] for name in ("memory_mb", "pids", *names)}


def verdicts(findings: dict[str, Finding], verdict: str) -> set[str]:
    return {name for name, finding in findings.items() if finding.verdict == verdict}


def hold(findings: dict[str, Finding], *, besides: Collection[str]) -> None:
    assert findings.keys() == NAMES
    assert {name: each for name, each in findings.items() if each.verdict != "holds" and name not in besides} == {}


async def audited(kind: str, **options: Any) -> dict[str, Finding]:
    runtime = make(kind, **options)
    missing = await asyncio.to_thread(runtime.check)
    need(not missing, kind, str(missing))
    return await audit(runtime)


async def audited_by_another_user(kind: str, uid: int, **options: Any) -> dict[str, Finding]:
    need_a_checkout_that_all_may_read()
    request = {"kind": kind, "uid": uid, "options": options, "python": host_python()}
    argv = [sys.executable, "-c", AUDIT, json.dumps(request)]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    need("missing" not in answer, f"{kind} for uid {uid}", str(answer.get("missing")))
    return {name: Finding(**finding) for name, finding in answer.items()}


async def test_what_holds_without_a_daemon(gateway: Gateway):
    """As root and as a plain user, whose lower guarantees are known."""
    options = {**gateway.options, **limits("file_mb")}
    if "images" in options:  # each user needs a directory of its own
        options["images"] += f"-of-{gateway.uid}"
    if gateway.uid == os.geteuid():
        findings = await audited(gateway.kind, **options)
    else:
        findings = await audited_by_another_user(gateway.kind, gateway.uid, **options)
    hold(findings, besides=MAY_BE_LOWER | (LOWER_WITHOUT_ROOT if gateway.uid else set()))
    if gateway.uid and findings["memory"] == Finding("lower", "each process alone"):  # there is no control group
        assert findings["processes"] == Finding("fails", "no limit")


async def test_what_holds_in_docker(docker_host: str):
    """An older daemon's own profile allows io_uring and AF_ALG, and the daemon shows /proc/interrupts."""
    hold(await audited("docker", host=docker_host, **limits("disk_mb")), besides={"disk", "secrets"})


def allow_all(machine: str, allowed: tuple[str, ...] = ()) -> bytes:
    return struct.pack("=HBBI", seccomp.RETURN, 0, 0, seccomp.ALLOW)


async def test_without_the_filter_the_calls_that_get_through_are_named(monkeypatch: pytest.MonkeyPatch):
    need_bubblewrap()
    monkeypatch.setattr(seccomp, "program", allow_all)
    reached = (await audited("bubblewrap", **limits("file_mb")))["system calls"]
    assert reached.verdict == "fails"
    assert {"keyctl", "unshare", "io_uring_setup", "bpf", "clone(CLONE_NEWUSER)"} <= {*reached.found.split("; ")}


def test_what_one_program_leaves_in_keyrings_and_directories_is_found_by_the_next(tmp_path: Path):
    """Without any sandbox."""
    calls = [(name, numbers(platform.machine())[name], []) for name in ("keyctl", "add_key")]
    mark = f"polar-gym-{uuid.uuid4().hex}"
    facts = {"mark": mark, "calls": calls, "places": [str(tmp_path)], "limits": {}, "guarantees": ["leftovers"]}
    argv = [sys.executable, "-I", "-", json.dumps(facts)]
    nothing, found = (json.loads(subprocess.check_output(argv, input=PROBE, timeout=60))["leftovers"] for _ in range(2))
    assert nothing == []
    assert {"in the user keyring", "in the persistent keyring", f"in {tmp_path}"} <= {*found}


def test_the_command_prints_a_failure_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    need_bubblewrap()
    monkeypatch.setattr(seccomp, "program", allow_all)
    with pytest.raises(typer.Exit) as ended:
        audit_sandboxes(["bubblewrap"])
    assert ended.value.exit_code == 1
    assert "bubblewrap: system calls" in capsys.readouterr().out


async def test_bad_mounts_are_found_and_a_shared_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    need_bubblewrap()
    need(os.geteuid() == 0, "root", "run the tests as root")
    (shared := tmp_path / "shared").mkdir(mode=0o755)
    shared.chmod(0o777)
    (file := tmp_path / "file").write_text("content")
    file.chmod(0o666)
    os.mknod(device := tmp_path / "kmsg", stat.S_IFCHR, os.makedev(1, 11))
    device.chmod(0o666)
    kept = [part for part in bubblewrap.ISOLATION if part != "--unshare-ipc"]
    binds = {"/var/tmp": shared, "/opt": shared, "/etc/shadow": file, "/proc/sys/kernel/core_pattern": file}
    mounts = [part for inside, host in binds.items() for part in ("--bind", str(host), inside)]
    mounts = ["--dir", "/etc", "--dir", "/var", *mounts]  # else only root may read them
    mounts += ["--dev-bind", str(device), "/dev/kmsg", "--ro-bind", str(shared), "/dev/shm"]
    monkeypatch.setattr(bubblewrap, "ISOLATION", (*kept, *mounts))
    findings = await audited("bubblewrap", **limits("file_mb"))
    found = {name: findings[name].found for name in verdicts(findings, "fails")}
    assert found.pop("shared memory").startswith(("PermissionError", "OSError"))
    assert "/etc/shadow" in found.pop("secrets").split("; ")
    assert found == {
        "devices": "/dev/kmsg",
        "kernel settings": "/proc/sys/kernel/core_pattern",
        "leftovers": "in /opt; in /var/tmp; in /dev/shm",
        "namespaces": "ipc is the machine's",
    }


@dataclasses.dataclass
class Careless:
    """A runtime whose sandboxes are in the machine's network, and have the gateway's environment."""

    runtime: Runtime

    async def start(self, request: SandboxRequest) -> Sandbox:
        spec = request.spec.model_copy(update={"network": "full", "environment": {"KEY": os.environ[SECRET]}})
        return await self.runtime.start(dataclasses.replace(request, spec=spec))

    def check(self) -> list[str]:
        return []

    async def close(self) -> None: ...


async def test_the_machines_network_environment_and_lacking_limits_are_found():
    need_bubblewrap()
    runtime: Any = Careless(make("bubblewrap"))
    findings = await audit(runtime)
    found = {name: findings[name].found for name in verdicts(findings, "fails")}
    assert "/environ" in found.pop("secrets")
    assert found.pop("network", "a route").startswith("a route"), "where the machine has one"
    unlimited = dict.fromkeys(("memory", "processes", "disk"), "no limit")
    assert found == {"namespaces": "net is the machine's", **unlimited}


@dataclasses.dataclass
class DefaultContainers:
    """Containers as `docker run` makes them without an option, besides the machine's /usr."""

    host: str

    async def start(self, request: SandboxRequest) -> DefaultContainer:
        with contextlib.closing(docker.DockerClient(base_url=self.host)) as client:
            import_skeleton(client, tag := skeleton_tag())
            container = client.containers.run(tag, ["sleep", "600"], detach=True, volumes=["/usr:/usr:ro"])
        return DefaultContainer(self.host, str(container.id))

    def check(self) -> list[str]:
        return []

    async def close(self) -> None: ...


@dataclasses.dataclass
class DefaultContainer:
    host: str
    name: str
    base_url: str = "http://127.0.0.1:8080"

    async def exec(self, command: Command) -> ExecResult:
        argv = ["docker", "--host", self.host, "exec", "--interactive", self.name, *command.argv]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
        process = await asyncio.create_subprocess_exec(*argv, **pipes)
        stdout, stderr = await process.communicate(command.stdin)
        return ExecResult(exit_code=process.returncode, stdout=stdout, stderr=stderr)

    async def stop(self) -> None:
        with contextlib.closing(docker.DockerClient(base_url=self.host)) as client:
            client.containers.get(self.name).remove(force=True)


async def test_dockers_default_is_as_the_table_says(docker_host: str):
    need_program("docker", "apt-get install docker.io")
    runtime: Any = DefaultContainers(docker_host)
    findings = await audit(runtime)
    reached = {*findings["system calls"].found.split("; ")}
    assert reached - OLDER_DOCKERS_ALLOW == {"chroot", "socket(AF_PACKET)"}
    depends = {"system calls", "secrets", "network"}  # on the daemon
    assert {each.name: findings[each.name].verdict for each in GUARANTEES if each.name not in depends} == {
        each.name: each.docker.verdict for each in GUARANTEES if each.name not in depends
    }
    assert worse_than_docker(findings) == [GUARANTEES[0]], "its old system calls only"
