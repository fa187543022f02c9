"""Front door 1: gymnasium environments.

`polar/swe` works on the tasks of a config, `polar/task` on one task of your own. Both are one environment, set up by
two functions (`setup`), and `registration` makes them known to gymnasium. `single` runs one session at a time,
`vector` one session for each sub-environment at the same time. Either holds a node in a background loop (`sessions`),
because gymnasium is synchronous and a node is not.
"""
