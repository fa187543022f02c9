"""No key is in /proc/PID/environ or /proc/PID/cmdline of a process that serves or runs sessions, or of its children."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from polar_gym.http.keys import CALLBACK_KEY, NODE_KEY, SERVICE_KEY
from tests.lifecycle.nodes import NodeProcess, client, order
from tests.lifecycle.server_process import ServerProcess
from tests.support.processes import POLAR_GYM, free_port
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking

KEYS = {
    SERVICE_KEY: "service-key-0123456789",
    NODE_KEY: "node-key-of-this-test-0123456789",
    CALLBACK_KEY: "callback-key-0123456789",
}
ENGINE_KEY = "engine-key-0123456789"
REFERENCE_KEY = "reference-key-0123456789"


def family(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            for child in listed.read_text().split():
                yield from family(int(child))


def shown(pid: int) -> str:
    """Return what /proc shows of a process; "" where the process is gone or belongs to another user."""
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        return "".join(Path(f"/proc/{pid}/{name}").read_text(errors="replace") for name in ("environ", "cmdline"))
    return ""


def keys_in_proc(pid: int) -> list[tuple[int, str]]:
    secrets = [*KEYS.values(), ENGINE_KEY, REFERENCE_KEY]
    return [(each, secret) for each in family(pid) for secret in secrets if secret in shown(each)]


async def test_a_gateway_shows_no_key_while_a_session_runs(tmp_path: Path) -> None:
    need_bubblewrap()
    node = NodeProcess(tmp_path, free_port(), environment=KEYS)
    try:
        await node.start()
        assert node.process is not None
        async with client(node.url) as speaker:
            await speaker.put(order("running", agent=asking("ask(); import time; time.sleep(60)")))
            await speaker.until("RUNNING", "running")
            pid = node.process.pid
            assert "TMPDIR" in shown(pid), "the rest of the environment is there"
            assert len(list(family(pid))) > 1, "there is a sandbox"
            assert keys_in_proc(pid) == []
    finally:
        await node.kill()


async def test_a_server_with_its_own_node_shows_no_key(tmp_path: Path) -> None:
    need_bubblewrap()
    server = ServerProcess(tmp_path / "state", "engine=embedded", "runtime=bubblewrap")
    await server.start()
    try:
        assert server.process.stderr is not None
        assert b"node local listens" in await asyncio.wait_for(server.process.stderr.readline(), 60)
        assert keys_in_proc(server.process.pid) == []
    finally:
        await server.stop()


async def test_a_rollout_shows_no_key_of_its_engines(tmp_path: Path) -> None:
    """The engine's key is an argument here, and also in a variable, as for `engine.api_key=${oc.env:...}`."""
    need_bubblewrap()
    asked: asyncio.Queue[tuple[str | None, list[tuple[int, str]]]] = asyncio.Queue()
    process: asyncio.subprocess.Process

    async def answer(request: web.Request) -> web.Response:
        asked.put_nowait((request.headers.get("Authorization"), keys_in_proc(process.pid)))
        return web.Response(status=401)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        process = await asyncio.create_subprocess_exec(
            *(*POLAR_GYM, "rollout", "engine=vllm", f"engine.url=http://127.0.0.1:{port}"),
            f"scoring.reference={{name: vllm, api_key: {REFERENCE_KEY}, url: http://127.0.0.1:{port}}}",
            *(f"engine.api_key={ENGINE_KEY}", "runtime=bubblewrap", f"rollout.output={tmp_path / 'episodes.jsonl'}"),
            env={**os.environ, **KEYS, "OUR_ENGINES_KEY": ENGINE_KEY},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 2, said
        assert asked.get_nowait() == (f"Bearer {ENGINE_KEY}", []), said
    finally:
        await runner.cleanup()
