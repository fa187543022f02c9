"""The weights that sampled an answer, by two counts: the version that the trainer set, and the engine's own label.

The trainer's version counts, because staleness is measured by it. The engine's label says at which token the weights
changed. A label may never change at all (`default`), or be counted in another way, so it stands beside the version.
"""

from __future__ import annotations

from collections.abc import Sequence

from polar_gym.schema import WeightVersion

INITIAL = "initial"
"""The name of the engine's weights until the first update."""

BEGUN_ANEW = "unknown (the server may have begun anew)"
"""The name of the weights of a server that came back and that no trainer has named again."""


def after_failure(version: str) -> str:
    """Return the name of the weights after an update to `version` that failed or was cancelled: any of them may be old
    or new."""
    return f"unknown (the update to {version} failed)"


def spans(told: Sequence[WeightVersion], began: str | None, ended: str | None, tokens: int) -> list[WeightVersion]:
    """Return the spans of an answer that began under the trainer's version `began` and ended under `ended`.

    `told`: the spans that the engine names, empty where it names none. Without a trainer's version nothing else is
    known. The label of a single span says which of the two versions it is. Among several spans, the first and the last
    are known by their place. A label only confirms this, because two counters may use the same numbers for different
    weights. Where the last label is the trainer's, another first label says that sampling began after an update.
    Where the trainer names one version only, a second label is of weights that the trainer has not named yet.
    """
    if not tokens or (began is None and ended is None):
        return list(told)
    ended = ended if ended is not None else BEGUN_ANEW
    told = told or [WeightVersion(version=INITIAL, start=0, end=tokens)]
    first = began if began is not None else told[0].version
    labels = [span.engine_version for span in told]
    if len(told) == 1:
        known = labels[0] is not None and labels[0] in (began, ended)
        return [_named(told[0], str(labels[0]), certain=True) if known else _between(told[0], first, ended)]
    began_late = began is not None and labels[-1] == ended and labels[0] not in (None, began)
    if began == ended:  # a trainer that loads the weights itself tells of them later
        first_span = _named(told[0], first, certain=labels[0] == began)
        others = (
            _named(span, ended, certain=True)
            if span.engine_version == ended
            else _until(span, first, span.engine_version)
            for span in told[1:]
        )
        return [first_span, *others]
    return [
        _between(told[0], first, ended) if began_late else _named(told[0], first, certain=labels[0] == began),
        *(_between(span, first, ended) for span in told[1:-1]),
        _named(told[-1], ended, certain=labels[-1] == ended),
    ]


def _named(span: WeightVersion, version: str, *, certain: bool) -> WeightVersion:
    return span.model_copy(update={"version": version, "estimated": not certain})


def _between(span: WeightVersion, first: str, ended: str) -> WeightVersion:
    """Return the span as estimated: its weights may have changed from `first` to `ended`, at an unknown token."""
    return _until(span, first, None if first == ended else ended)


def _until(span: WeightVersion, first: str, until: str | None) -> WeightVersion:
    return span.model_copy(update={"version": first, "estimated": True, "until": until})
