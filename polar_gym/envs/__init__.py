"""Front door 1: gymnasium environments.

`polar/swe` works on the tasks of a config, `polar/task` on one of your own. Both are one environment behind two
constructors (`swe`, `task`): `single` runs one session at a time, `vector` as many at once as it has sub-environments.
Either holds a node in a background loop (`sessions`), because gymnasium is synchronous and a node is not.
"""
