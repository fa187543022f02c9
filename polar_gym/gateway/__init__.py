"""The gateway: runs sessions on one machine, and records every model call of their harnesses.

    proxy     the HTTP port that harnesses talk to: forwards model calls to the engine, and records them
    session   one run of a harness, from its sandbox to its episode, and the stages that sessions pass through
    node      one gateway process: its engine, its proxy, its sessions, its state on the disk, its control port

`node` uses `session`, and `session` uses `proxy`; never the other way.
"""
