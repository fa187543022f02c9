"""Turn episodes into the arrays that a trainer takes a step on.

    advantage    GRPO's advantage, over sessions
    turn_values  values of the states before calls, from branches, and the advantages of calls by them
    row          a trace as one sequence to train
    batch        the rows of a step, those left out because they do not fit or teach nothing, and the counts of both
    sampling     the refusal of logprobs that are not those of the sampling
    tensors      rows as padded arrays
    arrow        rows as columns, in a form that is mapped into memory
    forest       rows with the prefixes that they share once
    nemo_rl      rows in the form of NeMo RL
    prime_rl     rows in the form of prime-rl
    trl          rows and episodes in the forms of TRL
    verl         rows in the form of verl
    annotations  per-token values of a trainer, for `polar-gym view`
    conformance  a check of trainers: the gradient does not depend on the packing

    batch = make_batch(infos["trajectory"], max_tokens=32768, zero_variance="drop", multiple_of=8)
    tensors = to_torch(padded(batch.rows, pad_id))

Arrays are numpy's until `to_torch`, which alone needs torch. This room uses `polar_gym.schema` and the modules at the
root, and no other room uses it: it is for the user's training script. It has no plug-ins.
"""

from polar_gym.training.batch import Batch, BatchCounts, make_batch
from polar_gym.training.row import Row
from polar_gym.training.tensors import padded, to_torch

__all__ = ["Batch", "BatchCounts", "Row", "make_batch", "padded", "to_torch"]
