"""Model calls for tests of the builders and the journal."""

from __future__ import annotations

from typing import Any

import numpy as np

from polar_gym.schema import ModelCall


def make_call(index: int, prompt: list[int], sampled: list[int], **fields: Any) -> ModelCall:
    """Return a delivered call, whose logprobs are -1/(1 + index), so that a misplaced span shows."""
    return ModelCall(
        call_id=f"call{index}",
        session_id="s",
        index=index,
        provider="openai_chat",
        model="policy",
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(sampled, dtype=np.int32),
        logprobs=np.full(len(sampled), -1.0 / (1 + index), dtype=np.float32),
        **{"messages": [{"role": "user", "content": str(prompt)}], "started_at": 0.0, "duration": 0.0, **fields},
    )
