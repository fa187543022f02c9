"""A tool and a conversation that asks for it."""

from __future__ import annotations

from typing import Any

BASH: Any = {
    "type": "function",
    "function": {
        "name": "bash",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}

ASK: Any = [{"role": "user", "content": "List the files."}]
