"""Turn episodes into data sets: accepted ones for supervised fine-tuning, all of them for reinforcement learning.

    sft           episodes to rows, one part at a time
    acceptance    which episodes and traces are accepted, and why the others are not
    rows          one example: a trace as exact token ids with a loss mask, and the same as chat messages with tools
    dataset       the directory: it grows in parts, so a run that was killed leaves a usable directory
    ledger        the record of the episodes that a directory has seen
    summary       tables of what was accepted
    rl            all traces of all episodes as one Parquet file, with logprobs and rewards

This room uses builders, chat, evaluators and the modules at the root, and needs pyarrow (the extra
`export`). The room cli uses it. It has no plug-ins.
"""
