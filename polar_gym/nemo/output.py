"""Writes one trace as the items of a Responses API answer, with the tokens where trainers read them.

NeMo RL makes one training sequence of `response.output`, from the items with `generation_token_ids`. The ids that an
item's `prompt_token_ids` add to everything seen so far are context. The generated ids are trained. NeMo RL demands that
each prompt begins with everything seen so far. The calls of a trace are token prefixes of each other, so this holds.

NeMo RL also groups samples by the ids of the first such prompt. A sample whose first prompt differs from that of the
other samples of its task is alone in its group, and gets no advantage. With `grpo.gym_multi_trace`,
`recipes/nemo_rl/run_grpo.py` groups samples by task, and trains the other traces too.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import numpy as np

from polar_gym.nemo.envelope import Span, trained_spans
from polar_gym.providers.openai_responses.recorded import Item, exchanges
from polar_gym.record import RoutedExperts
from polar_gym.schema import ModelCall, Trace


def main_trace(traces: Sequence[Trace], calls: Mapping[str, ModelCall]) -> Trace | None:
    """Return the trace that a trainer of single sequences gets; None where no trace is trained. `calls`: by id.

    This trace's first trained call has the main conversation's first prompt, which all samples of a task share. Samples
    do not share the prompt after a compaction or the prompt of a sub-agent. Where several traces begin with the first
    prompt (an answer was thrown away and asked for again), the trace with the most trainable tokens is returned.

    Two kinds of session still begin with a prompt that no other sample has. In the first, the first answer may not be
    trained (it was cut off, or its distribution was bent) and was not asked for again. In the second, the harness
    writes text into its first prompt that differs between sessions (a date: see `HarnessSpec.today`).
    """
    begins = [(trace, calls[spans[0].call_id]) for trace in traces if (spans := trained_spans(trace, calls))]
    if not begins:
        return None
    first = min((call for _, call in begins), key=lambda call: (call.kind != "main", call.index))
    alike = [trace for trace, call in begins if np.array_equal(call.prompt_ids, first.prompt_ids)]
    return max(alike, key=lambda trace: trace.trainable_tokens)


def output_items(trace: Trace, calls: Mapping[str, ModelCall], spans: Sequence[Span]) -> list[Item]:
    """Return the model's answers and the results of its tool calls, in order. `calls`: by id.

    The tokens of a call of `spans` are on the call's last item. A call that is not trained is context, without tokens.
    """
    trained = {span.call_id for span in spans}
    items: list[Item] = []
    for call, answer, results in exchanges([calls[call_id] for call_id in trace.call_ids]):
        if call.call_id in trained:
            answer[-1] |= {
                "prompt_token_ids": call.prompt_ids.tolist(),
                "generation_token_ids": call.response_ids.tolist(),
                "generation_log_probs": call.logprobs.tolist(),
            }
            if trace.routed_experts is not None:
                tokens = len(call.prompt_ids) + len(call.response_ids)
                answer[-1]["routed_experts"] = nemo_rl_experts(trace.routed_experts, tokens)
        items += [*answer, *results]
    return items


def nemo_rl_experts(experts: RoutedExperts, tokens: int) -> str:
    """Return the experts of a sequence's first `tokens` positions in the form of NeMo RL's router replay
    (`nemo_rl/utils/routed_experts_codec.py`). Each item has those of its whole prompt and answer, and -1 where a
    position was never run."""
    known = experts[:tokens]
    small = np.int8 if known.max(initial=0) <= np.iinfo(np.int8).max else np.int16
    rows = np.full((tokens, *known.shape[1:]), -1, small)
    rows[: len(known)] = known
    shape = "x".join(map(str, rows.shape))
    return f"nrlre1:{rows.dtype.name}:{shape}:{base64.b64encode(rows.tobytes()).decode()}"
