"""Front door 3: tasks -> sessions -> gateway nodes -> episodes.

`run` and `sweep` roll out configs on a node in this process. The rollout service does it for others, over HTTP and on
many nodes: `task` (the life of a task, pure), `scheduler` (who goes where, pure), `fleet` (which nodes live, pure),
`store`, `book` and `dispatcher` (what happens is written, and told to nodes), `service` (all of it, without HTTP),
`server` and `edge` (HTTP), `callbacks`, `client`, `ray_cluster`, and `process`, which puts them together.
"""
