"""Front door 1: gymnasium environments.

`polar/swe` works on the tasks of a config, `polar/task` on one task of your own. Both are one environment behind two
constructors (`swe`, `task`), which `registration` makes known to gymnasium. `single` runs one session at a time,
`vector` one session for each sub-environment at the same time. Either holds a node in a background loop (`sessions`),
because gymnasium is synchronous and a node is not.
"""
