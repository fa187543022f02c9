"""Sessions: the life of one run of a harness, from the queue to its episode.

- `life`: one session through its stages, INIT, READY, RUN and POSTRUN; whatever happens, its sandbox is removed.
- `stages`: the pools of a node that sessions pass through, and which session is next; `turns`: the queue of a pool.
- `preparation`: the files of a session on the gateway's machine.
- `sandboxes`: the sandboxes of a session, for the harness and for grading.
- `harness_run`: the run of the harness, and who is to blame for its end.
- `building`: captured calls become a trajectory.
- `work`: what the agent left in its sandbox.

The room uses `gateway.proxy` (the capture of a session's calls), `config`, and the rooms of the plug-ins: `evaluators`,
`harnesses`, `workspaces`, `builders`, `runtimes`. It knows no HTTP and no state directory.
"""
