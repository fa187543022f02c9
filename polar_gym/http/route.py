"""One route of an HTTP port, as its server, its document and its clients know it."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Generic, TypeVar
from urllib.parse import quote

from polar_gym.record import Record

JSON = "application/json"
NDJSON = "application/x-ndjson"
SSE = "text/event-stream"

G = TypeVar("G", bound=Record)


@dataclass(frozen=True, slots=True)
class Route(Generic[G]):
    """A method and a path, with the keys that open them and the records that go in and out."""

    method: str
    path: str
    """A template, e.g. `/v1/tasks/{task_id}`."""
    summary: str
    _: KW_ONLY
    takes: type[Record] | None = None
    gives: type[G] | None = None
    media: str = JSON
    many: bool = False
    """True: the answer is a list of `gives`."""
    query: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    """The names of the keys of which each opens the route; empty: the route needs no key."""
    statuses: tuple[int, ...] = (200,)
    """The statuses of success."""

    def url(self, base: str, **parts: object) -> str:
        """Return the URL of the route on the server at `base`. The parts of the path are quoted."""
        return base + self.path.format(**{name: quote(str(part), safe="") for name, part in parts.items()})
