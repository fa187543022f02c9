"""A byte stream into a sandbox: the gateway's connections and the sandbox's commands, over one stream that may be cut.

Where the gateway cannot listen inside of a sandbox, because the sandbox is on another machine, a relay does. It runs in
the sandbox (`in_sandbox/relay.py`), and its provider gives a stream to it, whichever way that can.

- `multiplex`: many connections over one stream, as a state machine without input or output.
- `link`: what drives the state machine on an event loop, and the connections.
- `websocket`: a stream through an HTTP proxy.
- `commands`: a command over a connection.
"""

from __future__ import annotations

import io
import zipfile
from functools import cache
from pathlib import Path

_ROOM = Path(__file__).parents[1]
_PARTS = ("relay/multiplex.py", "relay/link.py", "relay/commands.py", "relay/websocket.py")


@cache
def program() -> bytes:
    """Return the sandbox's end as a program: a zip file that Python runs, the same bytes every time."""
    parts = {f"polar_gym/runtimes/{name}": (_ROOM / name).read_bytes() for name in _PARTS}
    packages = dict.fromkeys(("polar_gym", "polar_gym/runtimes", "polar_gym/runtimes/relay"), b"")
    parts |= {f"{name}/__init__.py": empty for name, empty in packages.items()}
    parts["__main__.py"] = (_ROOM / "in_sandbox" / "relay.py").read_bytes()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in parts.items():
            archive.writestr(zipfile.ZipInfo(name), content)  # its time is fixed
    return buffer.getvalue()
