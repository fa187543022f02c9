"""Sandboxes whose gateway is a process of its own: another one of this user's, or one without root."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.lifecycle.runtime_kinds import host_python
from tests.support.requirements import need

NOBODY = 65534

_GATEWAY = """
import asyncio, ctypes, json, os, sys
from polar_gym.runtimes import Command
from tests.lifecycle.runtime_kinds import make, started

async def output(runtime, session_id, argv, stdin):
    async with started(runtime, session_id=session_id) as sandbox:
        result = await sandbox.exec(Command(argv=argv, stdin=stdin.encode()))
    assert result.exit_code == 0, result
    return result.stdout.decode()

async def outputs(commands):
    options = dict(request["options"])
    if "images" in options:  # each user needs a directory of its own
        options["images"] += f"-of-{os.geteuid()}"
    runtime = make(request["kind"], **options)
    if missing := runtime.check():
        return {"missing": missing}
    try:
        said = [await output(runtime, f"session-{at}", *command) for at, command in enumerate(commands)]
    finally:
        await runtime.close()
    return {"outputs": said}

request = json.loads(sys.argv[1])
if request["uid"] != os.geteuid():
    asyncio.run(outputs([[["true"], ""]]))  # loads all modules while this user still may read them
    os.setgroups([]); os.setgid(request["uid"]); os.setuid(request["uid"])
    os.chdir("/"); sys.executable = request["python"]
JOIN_SESSION_KEYRING = 1
number = {"x86_64": 250, "aarch64": 219}[os.uname().machine]
assert ctypes.CDLL(None).syscall(number, JOIN_SESSION_KEYRING, None) > 0  # as a login does
print(json.dumps(asyncio.run(outputs(request["commands"]))))
"""


async def outputs(
    *commands: tuple[Sequence[str], str], kind: str = "bubblewrap", uid: int | None = None, **options: Any
) -> list[str]:
    """Run commands (argv and input), each in the sandbox of another session of one new gateway; their outputs."""
    request = {
        **{"kind": kind, "options": options, "commands": commands},
        **{"uid": os.geteuid() if uid is None else uid, "python": host_python()},
    }
    argv = [sys.executable, "-c", _GATEWAY, json.dumps(request)]
    done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    need("missing" not in answer, f"{kind} for uid {request['uid']}", str(answer.get("missing")))
    return answer["outputs"]
