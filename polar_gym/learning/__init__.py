"""A policy that learns through a real harness, on a CPU: `polar-gym learn`.

    families      generated tasks, whose answer only an agent knows that reads the results of its commands
    model         a tiny model and its tokenizer, made on the spot
    cold_start    trains the model to imitate a careless agent
    start         has that agent play through the harnesses, and makes the start model of a run
    environments  vector environments of several harnesses, in which one model works
    grpo          the loop: rollout, batch, update, new weights
    run           the whole run in a directory, which a stopped run goes on with
    files, meter  the files of a run, and the time that its parts use
    report        the run as a table and as a curve

The room uses the gymnasium environments, `training`, `export` and `config`. torch and transformers are the extra
`torch`.
"""
