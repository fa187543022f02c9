"""One gateway node: a process that runs sessions for this machine or for a rollout server.

    node        an engine, a proxy and the stages that sessions pass through; runs sessions, knows nothing of a server
    assemble    makes tasks, requests, engine and node from a config
    service     the sessions that a rollout server gave to the node: takes, cancels, keeps and evicts them, without HTTP
    state       what the node keeps on disk
    salvage     makes episodes of the sessions whose process died
    admission   decides which parts of the machine a request may name
    settings    the settings of `polar-gym gateway`
    control     the control port, for the rollout server
    link        sends heartbeats and episodes to the rollout server
    metrics     what Prometheus reads
    threads     the threads for blocking work
    open_files  how many files the process may have open
    process     the node as a process

The room may use `gateway.session`, `gateway.proxy`, `config` and what lies below them; not `service`, which gives it
sessions over HTTP only.
"""
