"""The gateway's way into a container whose network namespace the gateway may not join.

The gateway listens on a Unix socket in a directory that is mounted into the container. A small relay inside accepts TCP
connections on the container's own 127.0.0.1 and passes their bytes on. The relay runs as root, without capabilities, so
that the agent can neither kill nor change it. It is run by node, or by python3 where there is no node.
"""

from __future__ import annotations

import asyncio

from polar_gym.runtimes import NODEJS, SandboxError
from polar_gym.runtimes.docker import streams
from polar_gym.runtimes.kernel.listener import GATEWAY_SOCKET

INSIDE = "/run/polar-gym"
"""The directory inside the container at which the socket's directory is mounted."""

_NODE = """
const net = require("net");
const [path, port] = process.argv.slice(1);
net.createServer({allowHalfOpen: true}, client => {
  const gateway = net.connect({path, allowHalfOpen: true});
  client.on("error", () => gateway.destroy());
  gateway.on("error", () => client.destroy());
  client.pipe(gateway).pipe(client);
}).listen(Number(port), "127.0.0.1", () => console.log("ready"));
"""

_PYTHON = """
import asyncio, sys
async def copy(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()
async def relay(reader, writer):
    try:
        from_gateway, to_gateway = await asyncio.open_unix_connection(sys.argv[1])
    except OSError:
        return writer.transport.abort()
    await asyncio.gather(copy(reader, to_gateway), copy(from_gateway, writer))
    writer.close()
    to_gateway.close()
async def main():
    server = await asyncio.start_server(relay, "127.0.0.1", int(sys.argv[2]))
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""

_LAUNCH = """
for node in node "$5"; do
    command -v "$node" > /dev/null && exec "$node" -e "$1" "$3" "$4"
done
command -v python3 > /dev/null && exec python3 -c "$2" "$3" "$4"
echo "the image has neither node nor python3"
"""


def argv(port: int) -> list[str]:
    """Return the command of the relay, to be run as root inside the container."""
    program = ["/bin/sh", "-c", _LAUNCH, "polar-gym-relay", _NODE, _PYTHON]
    return [*program, f"{INSIDE}/{GATEWAY_SOCKET}", str(port), NODEJS]


async def begin(host: str, exec_id: str) -> asyncio.StreamWriter:
    """Start the relay, and wait until it listens. It runs as long as its container. Raises `SandboxError`."""
    reader, writer = await streams.start(host, exec_id)
    said = b""
    try:
        async with asyncio.timeout(30):
            while not said.endswith(b"ready\n") and (frame := await streams.next_frame(reader)):
                said += await reader.readexactly(frame[1])
    except (TimeoutError, asyncio.IncompleteReadError):
        said += b" (and then nothing)"
    if not said.endswith(b"ready\n"):
        writer.close()
        raise SandboxError(
            f"the gateway's relay did not start inside the container: {said.decode(errors='replace').strip()}; "
            "run the gateway as root with runtime.gateway=namespace, or add node or python3 to the image"
        )
    return writer
