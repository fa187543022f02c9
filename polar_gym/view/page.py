"""One HTML file with script, style and data.

The page's content security policy names its script and its style by their hashes and forbids all else. Data lies in
`<script type="application/octet-stream">` elements, which no browser runs, as base64.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Literal

import orjson

from polar_gym.view.blocks import Block

HERE = Path(__file__).parent


def head(*, follows: bool, name: Literal["page", "live"] = "page") -> bytes:
    """Return the page without data. `follows`: it fetches its data from the server that it came from. `live`: the page
    of a rollout server, instead of that of episodes."""
    script, style = ((HERE / file).read_text(encoding="utf-8") for file in (f"{name}.js", "page.css"))
    source = "'self'" if follows else "'none'"
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(script)}",
            f"style-src {_hash(style)}",
            f"connect-src {source}",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
        ]
    )
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>polar-gym{' view' if name == 'page' else ''}</title><style>{style}</style></head>\n"
        f"<body{' data-follow' if follows else ''}>"
        '<noscript>This page shows its data by a script, which it contains.</noscript><div id="page"></div>\n'
        f'<script type="module">{script}</script>\n'
    ).encode()


def write_page(blocks: Iterable[Block], file: IO[bytes]) -> int:
    """Write a page with all blocks in it, and return how many there were."""
    file.write(head(follows=False))
    rows: list[dict[str, Any]] = []
    pieces: dict[str, dict[str, str]] = {}
    for block in blocks:
        file.write(_data(f"e{len(rows)}", block.data))
        rows.append(block.row)
        told = pieces.setdefault(block.row["tokenizer"] or "", {})
        told.update((str(each), text) for each, text in block.pieces.items())
    for name, value in (("rows", rows), ("pieces", pieces)):
        file.write(_data(name, zlib.compress(orjson.dumps(value))))
    file.write(b"</body></html>\n")
    return len(rows)


def line(block: Block) -> bytes:
    """Return a block as one line of JSON, which is how a page that follows gets it."""
    pieces = {str(each): text for each, text in block.pieces.items()}
    return orjson.dumps({"row": block.row, "pieces": pieces, "data": base64.b64encode(block.data).decode()}) + b"\n"


def _data(name: str, compressed: bytes) -> bytes:
    return b'<script type="application/octet-stream" id="%b">%b</script>\n' % (
        name.encode(),
        base64.b64encode(compressed),
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
