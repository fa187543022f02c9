"""Parts of Anthropic requests for tests."""

from __future__ import annotations

from typing import Any

from polar_gym.chat import ChatRequest
from polar_gym.providers.anthropic import PROVIDER

RUN: dict[str, Any] = {"name": "run", "input_schema": {"type": "object"}}

GO: dict[str, Any] = {"role": "user", "content": "go"}

PNG = {"type": "base64", "media_type": "image/png", "data": "AA"}


def parse(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return PROVIDER.parse({"model": "m", "max_tokens": 9, "messages": list(messages), **fields})


def text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def said(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def tool_use(id_: str, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id_, "name": "run", "input": given}


def result(id_: str, content: Any = "ok", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id_, "content": content, **fields}
