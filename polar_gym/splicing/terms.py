"""A request in the terms of one engine: its tool-call ids, and roles and content that its template takes."""

from __future__ import annotations

import logging
from dataclasses import replace

from polar_gym.chat import ChatRequest, has_media
from polar_gym.chat.ids import EngineIds
from polar_gym.engines import Engine, EngineError
from polar_gym.schema import Message

log = logging.getLogger(__name__)

BEFORE, LATE, AFTER = "I listen.", "Be kind.", "Go on."
LATE_SYSTEM: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello."},
    {"role": "assistant", "content": BEFORE},
    {"role": "system", "content": LATE},
    {"role": "user", "content": AFTER},
]

PNG = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAS0lEQVR42u3PMQ0AAAwDoPo33UrYvQQckD4XAQEBAQEBAQEBAQEBAQEBAQEBAQEB"
    "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAYHLAMpT0sIcNbcEAAAAAElFTkSuQmCC"
)
"""White, 64 pixels square: image processors refuse smaller ones."""
IMAGE: list[Message] = [
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}}]}
]


class Terms:
    """The terms of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._late_system_role = "system"
        """The role that a system message in mid-conversation is templated with."""
        self._reads_text_only = False

    async def probe(self) -> None:
        """Ask the engine which messages its template takes. Raises `EngineError` when the engine cannot be asked.

        Some templates raise an error at a second system message, leave it out in silence, or put it before all turns:
        there the message becomes a user message, in its place. Text-only models refuse images, which harnesses send
        whenever the policy opens one. There words take the place of an image: else the policy could end sessions as if
        the engine had failed.
        """
        self._late_system_role = "system" if await self._takes_late_system() else "user"
        try:
            await self._engine.template(IMAGE, [])
        except EngineError as error:
            self._reads_text_only = error.status == 400
            told = "in place of an image it is told that there was one" if self._reads_text_only else "images are sent"
            log.info("the model was asked whether it reads images: %s; %s", error.message, told)

    async def _takes_late_system(self) -> bool:
        """Return whether a system message in mid-conversation stands in the prompt, in its place."""
        try:
            ids = await self._engine.template(LATE_SYSTEM, [])
        except EngineError as error:
            if error.status != 400:
                raise
            return False
        between, found, _ = (await self._engine.decode(ids.tolist())).partition(BEFORE)[2].partition(AFTER)
        return LATE in between and bool(found)

    def of(self, ids: EngineIds, request: ChatRequest) -> ChatRequest:
        """Return the request with the engine's tool-call ids, and with roles and content that its template takes."""
        messages = ids.restored(request.messages)
        if self._reads_text_only:
            messages = [_in_words(message) if has_media(message) else message for message in messages]
        messages = [
            {**message, "role": self._late_system_role} if index and message["role"] == "system" else message
            for index, message in enumerate(messages)
        ]
        return replace(request, messages=messages)


def _in_words(message: Message) -> Message:
    parts = [part if part["type"] == "text" else _mention(part["type"]) for part in message["content"]]
    return {**message, "content": parts}


def _mention(kind: str) -> dict[str, str]:
    medium = kind.removeprefix("input_").removesuffix("_url")
    return {"type": "text", "text": f"[{medium} left out: this model reads text only]"}
