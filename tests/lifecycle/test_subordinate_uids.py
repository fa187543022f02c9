"""Each sandbox of a plain user has a uid of its own, where the machine gives that user subordinate uids."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from polar_gym.workspaces.repository import make_repository, pack_git_dir
from tests.lifecycle.other_gateway import NOBODY
from tests.lifecycle.runtime_kinds import Marked, host_python
from tests.support.requirements import need, need_bubblewrap, need_program

FIRST = 3_000_000
GIVEN = f"nobody:{FIRST}:65536\n"

GATEWAY = """
import asyncio, json, os, sys
from pathlib import Path
from polar_gym.runtimes import Mount, audit
from polar_gym.workspaces.diff import snapshot_diff
from tests.lifecycle.runtime_kinds import ask_gateway, gateway, make, sh, started

WORK = "rm old; mkdir -m 700 new; echo work > new/file; mkdir ~/in; head -c 3000000 /dev/zero > ~/in/file; chmod 0 ~/in"
IDENTITY = "id -u; id -g; id -un; id -G; stat -c %u . ~ /tmp new/file; cat /opt/mount/file"

async def session(runtime, name, command):
    serve, mounts = gateway(name), [Mount(Path(asked["mount"]), "/opt/mount")]
    options = {"workspace": Path(asked["workspace"]), "environment": {"SECRET": name}}
    async with started(runtime, session_id=name, serve=serve, mounts=mounts, **options) as sandbox:
        running = asyncio.create_task(sh(sandbox, f"{WORK}; exec {command}"))
        await asyncio.to_thread(sys.stdin.readline) if command != "true" else await running
        running.cancel()
        await asyncio.wait([running])
        diff = await snapshot_diff(sandbox, "/workspace", Path(asked["git_dir"]).read_bytes())
        identity = (await sh(sandbox, IDENTITY)).stdout.decode().split()
        answer, used = await ask_gateway(sandbox), sandbox.disk.view is None and sandbox.disk._used()
        return {"diff": diff.decode(), "identity": identity, "answer": answer, "used": used}

async def main(**commands):
    runtime = make("bubblewrap", scratch=asked["scratch"])
    assert not runtime.check(), runtime.check()
    sessions = await asyncio.gather(*(session(runtime, *each) for each in commands.items()))
    caveats = await asyncio.to_thread(runtime.caveats)
    done = {"sessions": sessions, "caveats": caveats}
    if asked["reap"] and os.geteuid() != 0:
        done["reaped"] = await runtime.reap(asked["reap"])
    if asked["audit"] and os.geteuid() != 0:
        done["audited"] = (await audit.audit(audit.make("bubblewrap")))["uid"].found
    return done

asked = json.loads(sys.argv[1])
asyncio.run(main(root="true"))  # loads all modules while this user still may read them
os.chown(asked["mount"], asked["uid"], asked["uid"]); os.chmod(asked["mount"], asked["mode"])
os.setgroups([]); os.setgid(asked["uid"]); os.setuid(asked["uid"])
os.umask(0o077); os.chdir("/"); sys.executable = asked["python"]
print(json.dumps(asyncio.run(main(**asked["commands"]))))
"""

TRY = """
import ctypes, os, sys
PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
pid = int(sys.argv[1])
def attempt(act):
    try:
        return bool(act())
    except PermissionError:
        return False
print(attempt(lambda: not os.kill(pid, 0)), end=" ")
print(attempt(lambda: b"SECRET" in open(f"/proc/{pid}/environ", "rb").read()), end=" ")
print(libc.ptrace(ctypes.c_long(PTRACE_SEIZE), ctypes.c_long(pid), None, None) == 0)
"""
"""Tries to signal a process, to read its environment and to trace it."""


@pytest.fixture
def asked() -> Iterator[dict[str, Any]]:
    """What a gateway is asked for, whose user may reach all files of it."""
    need_bubblewrap()
    need(os.geteuid() == 0, "root", "run the tests as root")
    need_program("newuidmap", "apt-get install uidmap")
    need_program("unshare", "apt-get install util-linux")
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        place = Path(directory)
        for name in ("source", "mount", "scratch"):
            (place / name).mkdir()
        (place / "source" / "old").write_text("old\n")
        (place / "mount" / "file").write_text("mounted")
        make_repository(place / "source", place / "workspace")
        (place / "git_dir").write_bytes(pack_git_dir(place / "workspace"))
        for path in (place, place / "scratch"):
            path.chmod(0o777)
        names = ("workspace", "git_dir", "mount", "scratch")
        yield {
            **{name: str(place / name) for name in names},
            "uid": NOBODY,
            "python": host_python(),
            "mode": 0o755,
            "commands": {},
            "reap": [],
            "audit": False,
        }
        assert list((place / "scratch").iterdir()) == []


@contextlib.asynccontextmanager
async def started_gateway(asked: dict[str, Any], subuid: str = GIVEN, subgid: str = GIVEN) -> AsyncIterator[Process]:
    """A gateway in a mount namespace with these /etc/subuid and /etc/subgid."""
    files = []
    for name, text in (("subuid", subuid), ("subgid", subgid)):
        files.append(Path(asked["scratch"]).with_name(name))
        files[-1].write_text(text)
    mount = 'mount --bind "$0" /etc/subuid; mount --bind "$1" /etc/subgid; shift; exec "$@"'
    argv = ["unshare", "--mount", "sh", "-ec", mount, *map(str, files), sys.executable, "-c", GATEWAY]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, json.dumps(asked), stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def outcome(process: Process, *, line: bytes = b"") -> dict[str, Any]:
    said, log = await process.communicate(line)
    assert process.returncode == 0, log.decode()
    return {**json.loads(said), "log": log.decode()}


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def attack(*, by: int, on: int) -> list[str]:
    """What a process outside of all sandboxes can do with the uid of another one."""
    uid = status(by)["Uid"][0]
    identity = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    return subprocess.check_output(["setpriv", *identity, host_python(), "-c", TRY, str(on)], text=True).split()


async def test_no_uid_is_shared_and_the_workspace_is_diffed_and_removed(asked: dict[str, Any]):
    """All had the gateway's uid: outside of their PID namespaces, one could have done all this to another."""
    one, two = Marked(), Marked()
    asked |= {"commands": {"one": one.command, "two": two.command}, "audit": True}
    async with started_gateway(asked) as process:
        for each in (one, two):
            await each.until(alive=True)
        (mine,), (other,) = one.pids(), two.pids()
        uids = [{*status(pid)["Uid"], *status(pid)["Gid"]} for pid in (mine, other)]
        groups = [status(pid)["Groups"] for pid in (mine, other)]
        tried = [attack(by=mine, on=other), attack(by=other, on=mine)]
        done = await outcome(process, line=b"\n\n")
    assert tried == [["False", "False", "False"]] * 2
    (first,), (second,) = uids
    assert len({first, second, str(NOBODY)}) == 3
    assert {int(first), int(second)} <= {*range(FIRST, FIRST + 65536)}
    assert groups == [[], []]
    for uid, name, each in zip((first, second), ("one", "two"), done["sessions"], strict=True):
        assert each["identity"] == [uid, uid, "agent", uid, *[uid] * 4, "mounted"]
        assert "+++ b/new/file" in each["diff"]
        assert "--- a/old" in each["diff"]
        assert each["answer"] == name
        assert each["used"] > 3_000_000, "a sandbox that fills the machine's disk is found by this"
    assert "each sandbox has a uid of its own" in done["caveats"][0]
    assert done["log"].count("sandboxes are limited process by process only") <= 1, "what lacks is said once"
    assert done["audited"] == "limits are one user's"


async def test_files_of_a_killed_gateway_are_removed_by_the_next(asked: dict[str, Any]):
    running = Marked()
    async with started_gateway({**asked, "commands": {"one": running.command}}) as process:
        await running.until(alive=True)
        process.kill()
    await running.until(alive=False)
    assert len(list(Path(asked["scratch"]).iterdir())) == 1
    async with started_gateway({**asked, "reap": ["one"]}) as process:
        assert (await outcome(process))["reaped"] == 1


@pytest.mark.parametrize(
    ("subuid", "subgid", "reason"),
    [
        ("", "", "nobody has no range in both /etc/subuid and /etc/subgid; give one with: usermod"),
        (f"# given\nnobody:1:1\n{NOBODY}:{FIRST}:1\n", f"nobody:1:9\n{NOBODY}:{FIRST}:1\n", None),
        (f"nobody:{2**32 - 9}:65536\n", f"nobody:{2**32 - 9}:65536\n", "newuidmap: subuid overflow detected"),
    ],
    ids=["none", "one in common", "bad"],
)
async def test_without_usable_ones_all_share_the_gateways_uid(
    asked: dict[str, Any], subuid: str, subgid: str, reason: str | None
):
    asked |= {"commands": {"one": "true"}, "audit": subuid == ""}
    async with started_gateway(asked, subuid, subgid) as process:
        done = await outcome(process)
    if reason is None:
        assert done["sessions"][0]["identity"][0] == str(FIRST)
    else:
        assert done["sessions"][0]["identity"][0] == "1000"
        assert f"all sandboxes share the uid {NOBODY} (no subordinate uids can be used: {reason}" in done["caveats"][0]
        assert done.get("audited", "one for all sandboxes") == "one for all sandboxes"


async def test_mount_that_is_closed_to_other_uids_is_read_with_the_gateways(asked: dict[str, Any]):
    """As below a home directory that was made with the umask 077."""
    asked |= {"commands": {"one": "true"}, "mode": 0o700}
    async with started_gateway(asked) as process:
        (session,) = (await outcome(process))["sessions"]
    assert [session["identity"][0], session["identity"][-1]] == ["1000", "mounted"]
