"""Training runs that show whether a policy learns: `make show-learning`.

`units` has the runs and their controls, `relay` a family in which codex compacts its context, `proofs` the page of the
finished runs.
"""
