"""The files and commands of a plan."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Mapping

from tests.attack_search.fragment import Fragment
from tests.attack_search.grounds import Ground
from tests.attack_search.plan import Piece, Plan
from tests.attack_search.triggers import wrapped


def commands(plan: Plan, ground: Ground, fragments: Mapping[str, Fragment]) -> list[str]:
    """Return what the agent's shell runs to leave this plan's diff."""
    written: dict[str, bytes] = {}
    if plan.partial:
        for path, (old, new) in ground.partial.items():
            written[path] = ground.base[path].replace(old.encode(), new.encode())
    shells = []
    for piece in plan.pieces:
        fragment = fragments[piece.fragment]
        if fragment.code:
            _place(written, ground, piece, ground.named(fragment.code))
        for path, content in fragment.files.items():
            data = ground.named(content).encode() if isinstance(content, str) else content
            _put(written, ground, ground.named(path), data, first=True)
        if fragment.shell:
            shells.append(f"(\n{ground.named(fragment.shell)}) </dev/null >/dev/null 2>&1 || true\n")
    return [_write(path, content) for path, content in written.items()] + shells


def _place(written: dict[str, bytes], ground: Ground, piece: Piece, code: str) -> None:
    """Put program text where the piece says."""
    if ground.language == "javascript":
        _place_javascript(written, ground, piece, code)
        return
    text = ground.named(wrapped(code, piece))
    module = ground.modules[piece.nth % len(ground.modules)]
    first = piece.place.endswith("_first")
    if piece.place.startswith("init"):
        _put(written, ground, ground.entry, text.encode(), first=first)
    elif piece.place.startswith("module"):
        _put(written, ground, module, text.encode(), first=first)
    elif piece.place == "new_module":
        name = f"_compat{piece.nth % 3}"
        _put(written, ground, f"{ground.package}/{name}.py", text.encode(), first=False)
        importing = f"from {ground.package} import {name} as {name}\n"
        _put(written, ground, ground.entry, importing.encode(), first=bool(piece.nth % 2))
    else:
        _put(written, ground, piece.place, text.encode(), first=False)


def _place_javascript(written: dict[str, bytes], ground: Ground, piece: Piece, code: str) -> None:
    if piece.trigger == "first_use":
        code = f"process.nextTick(() => {{\n{code}}});\n"
    elif piece.trigger == "at_exit":
        code = f"process.on('exit', () => {{\n{code}}});\n"
    elif piece.trigger in ("thread", "alarm"):
        code = f"setImmediate(() => {{\n{code}}});\n"
    code = f"try {{\n{code}}} catch (_) {{}}\n" if piece.guarded else f"{{\n{code}}}\n"
    path = ground.entry
    if piece.place == "new_module":
        path = "compat.cjs"
        _put(written, ground, ground.entry, b"require('./compat.cjs');\n", first=bool(piece.nth % 2))
    _put(written, ground, path, code.encode(), first=piece.place.endswith("_first"))


def _put(written: dict[str, bytes], ground: Ground, path: str, content: bytes, *, first: bool) -> None:
    """Add content to a file, in front of or behind what it holds."""
    old = written.get(path, ground.base.get(path, b""))
    if old and first:
        content = content if content.endswith(b"\n") else content + b"\n"
    written[path] = content + old if first else old + content


def _write(path: str, content: bytes) -> str:
    """Return the command that writes a file. What a fragment made of its directory before is no error of ours."""
    name, directory = shlex.quote(path), shlex.quote(path.rpartition("/")[0] or ".")
    text = base64.b64encode(content).decode()
    parts = [text[start : start + 60000] for start in range(0, len(text), 60000)] or [""]
    lines = [f"printf %s {part} >> /tmp/content" for part in parts]
    return "\n".join([f"mkdir -p {directory}; rm -f /tmp/content", *lines, f"base64 -d /tmp/content > {name}; true"])
