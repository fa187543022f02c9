"""A request in the terms of one engine: its tool-call ids, and roles and content that its template takes."""

from __future__ import annotations

import base64
import io
import logging
import wave
from dataclasses import replace
from typing import Any

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


def _showing(kind: str, url: str) -> list[Message]:
    return [{"role": "user", "content": [{"type": kind, kind: {"url": url}}]}]


def _silence() -> str:
    """Return a second of silence as a WAV file, in base64."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(32_000))
    return base64.b64encode(file.getvalue()).decode()


SAMPLES = {
    "image": _showing("image_url", f"data:image/png;base64,{PNG}"),
    "audio": _showing("audio_url", f"data:audio/wav;base64,{_silence()}"),
}
"""A medium -> messages with a sample of it. No engine is asked for other media: words take their place."""


class Terms:
    """The terms of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._late_system_role = "system"
        """The role that a system message in mid-conversation is templated with."""
        self._media: set[str] = set()
        """Those that the model reads."""

    async def probe(self) -> None:
        """Ask the engine which messages its template takes. Raises `EngineError` when the engine cannot be asked.

        Some templates raise an error at a second system message, leave it out in silence, or put it before all turns:
        there the message becomes a user message, in its place. Text-only models refuse images, which harnesses send
        whenever the policy opens one, and many models with eyes refuse sounds. There words take the place of an image
        or a sound: else the policy could end sessions as if the engine had failed.
        """
        self._late_system_role = "system" if await self._takes_late_system() else "user"
        for medium, sample in SAMPLES.items():
            if await self._reads(medium, sample):
                self._media.add(medium)

    async def _reads(self, medium: str, sample: list[Message]) -> bool:
        try:
            await self._engine.template(sample, [])
        except EngineError as error:
            told = "words take its place" if error.status == 400 else "it is sent"
            log.info("the model was asked whether it reads this medium, %s: %s; %s", medium, error.message, told)
            return error.status != 400
        return True

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
        messages = [self._in_words(message) if has_media(message) else message for message in messages]
        messages = [
            {**message, "role": self._late_system_role} if index and message["role"] == "system" else message
            for index, message in enumerate(messages)
        ]
        return replace(request, messages=messages)

    def _in_words(self, message: Message) -> Message:
        """Return the message with words in place of the media that the model does not read."""
        return {**message, "content": [self._part_in_words(part) for part in message["content"]]}

    def _part_in_words(self, part: dict[str, Any]) -> dict[str, Any]:
        medium = part["type"].removeprefix("input_").removesuffix("_url")
        if medium == "text" or medium in self._media:
            return part
        reads = f"text and {' and '.join(sorted(self._media))}" if self._media else "text"
        return {"type": "text", "text": f"[{medium} left out: this model reads {reads} only]"}
