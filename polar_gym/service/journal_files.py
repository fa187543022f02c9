"""Keeps the journals of running sessions, as their nodes send them: a session whose node is gone for good goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection
from pathlib import Path

from polar_gym.gateway.session.starting import JOURNAL, MANIFEST
from polar_gym.protocol import JournalPiece


class JournalFiles:
    """A directory for each session, with one for each attempt. Methods block: call them in a thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._changing = threading.Lock()
        """Held while a journal is read, written or removed."""

    def append(self, piece: JournalPiece, most_bytes: int) -> int | None:
        """Append a piece to its journal, and return the bytes that are here of this journal: a piece that does not
        begin there is left out. None: the journals of the session would take more than `most_bytes`. Raise `OSError`.
        """
        with self._changing:
            session = self.directory / piece.session_id
            attempt = session / str(piece.attempt)
            journal, lines = attempt / JOURNAL, piece.lines.encode()
            size = journal.stat().st_size if journal.exists() else 0
            if piece.start != size:
                return size
            if sum(path.stat().st_size for path in session.glob("*/*")) + len(lines) > most_bytes:
                return None
            if piece.manifest is not None:
                attempt.mkdir(mode=0o700, parents=True, exist_ok=True)
                (attempt / MANIFEST).write_text(piece.manifest, encoding="utf-8")
            with journal.open("ab") as file:
                file.write(lines)
            return size + len(lines)

    def of(self, session_id: str) -> list[JournalPiece]:
        """Return the journals of a session, each as one piece. Raise `OSError`."""
        with self._changing:
            found = [_piece(attempt) for attempt in (self.directory / session_id).glob("*")]
        return [piece for piece in found if piece is not None]

    def keep_only(self, session_ids: Collection[str]) -> None:
        """Remove the journals of all other sessions. Raise `OSError`."""
        for session in self.directory.glob("*"):
            if session.name not in session_ids:
                with self._changing:
                    shutil.rmtree(session)


def _piece(attempt: Path) -> JournalPiece | None:
    """Return the journal in the directory of an attempt; None where there is none, or only the rest of a removal."""
    try:
        return JournalPiece(
            session_id=attempt.parent.name,
            attempt=int(attempt.name),
            manifest=(attempt / MANIFEST).read_text(encoding="utf-8"),
            lines=(attempt / JOURNAL).read_text(encoding="utf-8", errors="replace"),
        )
    except FileNotFoundError:
        return None
