"""The rollout service: takes tasks over HTTP, runs their sessions on gateway nodes, and hands out the episodes.

`polar-gym serve` starts it. (`polar-gym rollout`, in the room `runs`, runs tasks on this machine without a server.)

The decisions, as pure code without a clock, a disk or a network:

    task            the life of one task: its samples, their placements and attempts, which episode is accepted
    scheduler       which waiting session goes to which node
    fleet           which nodes live, what they hold, how many free places they have
    weights         which weight versions there were, and how far a session lies behind
    change          what happened to a task, to be written as one

The state, and the work on it:

    store           SQLite: tasks, samples, events, outbox, weights
    episode_files   the episodes in full, one file each
    journal_files   the journals of running sessions, for the case that their node dies
    book            the live tasks in memory, and the only way to write about them
    bounds          refuses tasks that are too many, and evicts old episodes and journals
    dispatcher      gives sessions to nodes, and calls them off
    callbacks       sends results to a task's `callback_url`
    addresses       decides to which addresses callbacks go
    service         all of these together, without HTTP
    metrics         what Prometheus reads
    live            what the page of the server shows

The edges:

    server, openapi the HTTP port and its description
    node_link       the requests that the server sends to nodes
    settings        the settings of `polar-gym serve`
    process         the server as a process
    ray_cluster     nodes on the machines of a Ray cluster

The room may use `gateway.node`, `gateway.session.turns`, `config`, `http`, `view` and what lies below them. Only `cli`
uses it; clients know nothing but `protocol`.
"""
