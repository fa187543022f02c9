"""The text for `render_mode="ansi"`: the model calls of a session so far, as a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar_gym.schema import Message, ModelCall

SHOWN = 1000
"""Characters that are shown of each end of a long text: a harness's own prompts are long."""


def transcript(session: str, calls: Sequence[ModelCall]) -> str:
    """Return the transcript of calls below the headline `session`.

    Each call shows the messages that it adds to the call that it continues, and the model's answer.
    """
    by_id = {call.call_id: call for call in calls}
    lines = [f"== {session}"]
    for call in calls:
        parent = by_id.get(call.parent_id or "")
        lines.append(f"-- call {call.index} ({call.kind}, {len(call.response_ids)} tokens sampled)")
        known = len(parent.messages) + 1 if parent is not None else 0  # its messages, and its answer
        lines += [_said(message) for message in call.messages[known:]]
        lines.append(_said({"role": "assistant", **call.response}) if call.response else f"no answer: {call.error}")
    return "\n".join(lines) + "\n"


def _said(message: Message) -> str:
    parts = [f"<{message['reasoning']}>"] if message.get("reasoning") else []
    parts += [_text(message["content"])] if message.get("content") else []
    called = [tool_call["function"] for tool_call in message.get("tool_calls") or []]
    parts += [f"-> {function['name']}({function['arguments']})" for function in called]
    return f"[{message['role']}] " + "\n".join(map(_cut, parts))


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"({part.get('type')})") for part in content)


def _cut(text: str) -> str:
    left_out = len(text) - 2 * SHOWN
    return text if left_out <= 0 else f"{text[:SHOWN]}\n... {left_out} characters left out ...\n{text[-SHOWN:]}"
