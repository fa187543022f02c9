"""The laws of the training envelope that NeMo Gym's users get."""

from __future__ import annotations

from typing import Any


def check_envelope(envelope: dict[str, Any], trained: set[str], rollout_id: str = "s") -> None:
    """Check the law of `training_traces`: each trained call is in exactly one trace, and the spans are the mask."""
    assert (envelope["schema_version"], envelope["rollout_id"]) == (1, rollout_id)
    named = [call_id for trace in envelope["traces"] for call_id in trace["model_call_ids"]]
    assert sorted(named) == sorted(trained)
    for trace in envelope["traces"]:
        length = len(trace["token_ids"])
        assert len(trace["loss_mask"]) == len(trace["generation_logprobs"]) == length
        mask = [0] * length
        for span in trace["sampled_spans"]:
            mask[span["start"] : span["end"]] = [1] * (span["end"] - span["start"])
        assert trace["loss_mask"] == mask
        assert mask[0] == 0
        assert [span["model_call_id"] for span in trace["sampled_spans"]] == trace["model_call_ids"]
        assert all(
            logprob == 0.0 for logprob, trained in zip(trace["generation_logprobs"], mask, strict=True) if not trained
        )
