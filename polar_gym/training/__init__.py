"""Episodes -> what a trainer takes a step on.

`advantage` is the arithmetic of GRPO over sessions. `batch` makes rows of traces, applies the policies for rows that
do not fit or teach nothing, and keeps the balance of what came in and what goes out. `tensors`, `nemo_rl` and `trl` are
the forms in which trainers take them. Nothing here needs torch: arrays are numpy's until `to_torch`.

    batch = make_batch(infos["trajectory"], max_tokens=32768, zero_variance="drop", multiple_of=8)
    tensors = to_torch(padded(batch.rows, pad_id))
"""

from polar_gym.training.batch import Balance, Batch, Row, make_batch
from polar_gym.training.tensors import padded, to_torch

__all__ = ["Balance", "Batch", "Row", "make_batch", "padded", "to_torch"]
