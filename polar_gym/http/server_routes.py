"""The routes of the rollout server.

Trainers have the service key, nodes the node key; both send theirs as `Authorization: Bearer`. The body of every error
is an `ErrorAnswer`.
"""

from __future__ import annotations

from polar_gym import protocol, schema
from polar_gym.http.route import NDJSON, SSE, Route

TRAINER = ("service",)
NODE = ("node",)

# fmt: off
SUBMIT = Route("POST", "/v1/tasks", "Submit a task: 201 new, 200 the same again, 409 another request with this task_id",
               takes=schema.TaskRequest, gives=protocol.TaskState, keys=TRAINER, statuses=(200, 201))
TASKS = Route("GET", "/v1/tasks", "List tasks, newest first",
              gives=protocol.TaskPage, query=("limit", "after", "status"), keys=TRAINER)
TASK = Route("GET", "/v1/tasks/{task_id}", "Get one task", gives=protocol.TaskState, keys=TRAINER)
CANCEL = Route("DELETE", "/v1/tasks/{task_id}", "Cancel a task", gives=protocol.TaskState, keys=TRAINER)
EVENTS = Route("GET", "/v1/tasks/{task_id}/events", "Follow the events of a task; Last-Event-ID resumes",
               gives=protocol.Event, media=SSE, keys=TRAINER)
EPISODES = Route("GET", "/v1/tasks/{task_id}/episodes",
                 "Get the episodes of a task in order of arrival, one a line, behind that of session `after`",
                 gives=schema.Episode, media=NDJSON, query=("after", "wait", "follow", "excluded"), keys=TRAINER)
EPISODE = Route("GET", "/v1/episodes/{session_id}", "Get the accepted episode of a session, or that of an attempt",
                gives=schema.Episode, query=("attempt",), keys=TRAINER)
NODES = Route("GET", "/v1/nodes", "List living gateway nodes", gives=protocol.NodeState, many=True, keys=TRAINER)
GENERATION = Route("POST", "/v1/generation", "Pause or resume model calls on all nodes",
                   takes=protocol.Generation, gives=protocol.GenerationState, keys=TRAINER)
WEIGHTS = Route("POST", "/v1/weights", "Tell all nodes that the engine's weights were updated",
                takes=protocol.Weights, gives=protocol.GenerationState, keys=TRAINER)
HEARTBEAT = Route("POST", "/v1/nodes/{node}/heartbeat",
                  "Report that a node lives; 409: another process took this node's name",
                  takes=protocol.Heartbeat, gives=protocol.HeartbeatAnswer, keys=NODE)
DELIVER = Route("POST", "/v1/nodes/{node}/episodes", "Deliver an episode of a node",
                takes=protocol.Delivery, gives=protocol.DeliveryAnswer, keys=NODE)
JOURNALS = Route("POST", "/v1/nodes/{node}/journals", "Send what the journals of running sessions have that is new",
                 takes=protocol.Journals, gives=protocol.JournalsAnswer, keys=NODE)
DRAIN = Route("POST", "/v1/nodes/{node}/drain", "Let a node finish its sessions and give it nothing new",
              gives=protocol.NodeState, keys=NODE + TRAINER)
NODE_DIED = Route("DELETE", "/v1/nodes/{node}", "Report that a node is dead: its sessions go elsewhere",
                  query=("incarnation",), keys=NODE, statuses=(204,))
PAGE = Route("GET", "/", "Show a page of what the service does now; the page asks for the service key")
LIVE = Route("GET", "/v1/live",
             "Tell what the service does now; `follow`: then a JSON merge patch every second, one a line",
             gives=protocol.Live, media=NDJSON, query=("follow",), keys=TRAINER)
HEALTHZ = Route("GET", "/healthz", "Tell whether the process works")
READYZ = Route("GET", "/readyz", "Tell whether a new task would begin")
METRICS = Route("GET", "/metrics", "Get metrics for Prometheus")
OPENAPI = Route("GET", "/openapi.json", "Get this document")
