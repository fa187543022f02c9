"""Training runs that show whether a policy learns: `make show-learning`.

`units` has the runs and their controls, `relay` a family in which codex compacts its context, `march` one whose
sessions have ten calls, `proofs` the page of the finished runs.
"""
