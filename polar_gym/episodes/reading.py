"""Read the results of a rollout: the episodes of a file, and the captured calls in the journal of an episode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from polar_gym.durable import read_records
from polar_gym.errors import ConfigError
from polar_gym.gateway.proxy.journal import read_journal
from polar_gym.schema import Episode, ModelCall


def read_episodes(file: Path) -> Iterator[Episode]:
    """Yield the episodes of a JSON lines file. Files of earlier versions are read as long as the record fits.

    Raises `ConfigError` naming the line and the field that is wrong, and where the file holds no episode.
    """
    return read_records(file, Episode, "episode", "an episode of this version")


def read_all(files: Iterable[Path]) -> Iterator[Episode]:
    """Yield the episodes of several files, as `read_episodes` does. Raises `ConfigError` for one that occurs twice."""
    return (episode for _, episode in read_with_files(files))


def read_with_files(files: Iterable[Path]) -> Iterator[tuple[Path, Episode]]:
    """Yield the file and the episode, as `read_all` does."""
    places: dict[str, Path] = {}
    for file in files:
        for episode in read_episodes(file):
            if (label := episode.session.label) in places:
                raise ConfigError(
                    f"{file}: session {label} is in {places[label]} already, and would count twice; name each file "
                    "once, and no copy of a file"
                )
            places[label] = file
            yield file, episode


def began_again(episode: Episode) -> bool:
    """Return whether a session could not go on with its own record, so that its sample began again as another one."""
    failure, start = episode.session.failure, episode.request.start_from
    return failure is not None and failure.kind == "diverged" and start is not None and start.owned


def read_calls(episode: Episode) -> list[ModelCall]:
    """Return the captured calls of an episode. Raises `ConfigError` where the journal is gone or damaged."""
    journal = episode.artifacts.journal
    if journal is None or not Path(journal).is_file():
        raise ConfigError(
            f"session {episode.session.session_id}: its journal {journal!r} is not there; use the machine of the "
            "rollout, and keep its rollout.state (gym.make keeps it only where it is set)"
        )
    return read_journal(Path(journal))
