"""The routes of a gateway node's control port, which the rollout server asks with the node key.

The base of the URL is the heartbeat's `url`. The body of every error is an `ErrorAnswer`.
"""

from __future__ import annotations

from polar_gym import protocol, schema
from polar_gym.http.route import Route

NODE = ("node",)

# fmt: off
DISPATCH = Route("PUT", "/v1/sessions/{session_id}/{attempt}",
                 "Begin a session; 422: no node can run this request; 503: this node cannot take it now",
                 takes=protocol.Dispatch, gives=schema.Session, keys=NODE, statuses=(200, 201))
CANCEL = Route("DELETE", "/v1/sessions/{session_id}/{attempt}",
               "Cancel a session; 204 also when the node has no such session",
               keys=NODE, statuses=(204,))
GENERATION = Route("POST", "/v1/generation", "Pause or resume model calls",
                   takes=protocol.Generation, gives=protocol.GenerationAnswer, keys=NODE)
WEIGHTS = Route("POST", "/v1/weights", "Tell the node that the engine's weights were updated",
                takes=protocol.Weights, gives=protocol.GenerationAnswer, keys=NODE)
DRAIN = Route("POST", "/v1/drain", "Finish the sessions that there are and take nothing new",
              keys=NODE, statuses=(204,))
HEALTHZ = Route("GET", "/healthz", "Tell whether the process works")
READYZ = Route("GET", "/readyz", "Tell whether the node takes sessions")
TRANSCRIPTS = Route("GET", "/v1/transcripts", "Get the end of each running session's conversation",
                    gives=protocol.Transcript, many=True, keys=NODE)
METRICS = Route("GET", "/metrics", "Get metrics for Prometheus")

# For operators; the rollout server does not ask these.
SESSIONS = Route("GET", "/v1/sessions", "List all sessions that the node holds",
                 gives=schema.Session, many=True, keys=NODE)
SESSION = Route("GET", "/v1/sessions/{session_id}/{attempt}", "Get one session", gives=schema.Session, keys=NODE)
EPISODE = Route("GET", "/v1/sessions/{session_id}/{attempt}/episode", "Get the episode of a session, once there is one",
                gives=schema.Episode, keys=NODE)
