"""One trace per call: the prompt is masked, and the sampled tokens are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polar_gym.builders.trace import merge_path
from polar_gym.schema import ModelCall, Trace


def per_request(calls: Sequence[ModelCall], excluded: Mapping[str, str]) -> list[Trace]:
    return [
        merge_path([call], {call.call_id}) for call in calls if len(call.response_ids) and call.call_id not in excluded
    ]


BUILDER = per_request
