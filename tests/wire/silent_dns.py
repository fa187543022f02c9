"""Which names a harness looks up, in a network of its own where every look-up stays without an answer.

`look_ups` runs this module inside `bwrap`: the process is alone with the loopback device, a resolver that listens and
says nothing, the stand-in, and the harness.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from polar_gym.harnesses import HARNESSES
from polar_gym.providers.openai_chat import PROVIDER as CHAT
from tests.support.requirements import need_bubblewrap
from tests.wire.harness_probe import run_harness
from tests.wire.stand_in import assistant, completion, serving

CONTROL = "control.invalid"
"""Looked up beside the harness: a resolver that does not hear this name would hear nothing of the harness either."""


def look_ups(harness: str, place: Path) -> dict[str, Any]:
    """`exit_code` and `stdout` of the harness after one answer, and `names`, what it looked up."""
    need_bubblewrap()
    resolver = place / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    sandbox = ["bwrap", "--unshare-user", "--uid", "0", "--unshare-net", "--cap-add", "CAP_NET_BIND_SERVICE"]
    sandbox += ["--dev-bind", "/", "/", "--ro-bind", str(resolver), "/etc/resolv.conf", "--die-with-parent"]
    command = [*sandbox, sys.executable, "-m", "tests.wire.silent_dns", harness, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    found["names"].remove(CONTROL)
    return found


class _SilentResolver(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """The question follows a header of 12 bytes: labels, each after its length, up to an empty one."""
        labels, position = [], 12
        while length := data[position]:
            labels.append(data[position + 1 : position + 1 + length].decode())
            position += 1 + length
        self.names.add(".".join(labels))


async def _run(harness: str, place: Path) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    transport, resolver = await loop.create_datagram_endpoint(_SilentResolver, local_addr=("127.0.0.1", 53))
    async with serving([CHAT], []) as stand_in:
        stand_in.afterwards = completion(assistant("all done"))
        control = await asyncio.create_subprocess_exec("getent", "ahosts", CONTROL)
        run = await run_harness(HARNESSES.get(harness), stand_in, place, "go")
        await control.wait()
    transport.close()
    return {"exit_code": run.exit_code, "stdout": run.stdout.strip(), "names": sorted(resolver.names)}


if __name__ == "__main__":
    json.dump(asyncio.run(_run(sys.argv[1], Path(sys.argv[2]))), sys.stdout)
