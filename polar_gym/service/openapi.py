"""The service's OpenAPI 3.1 document, made from the records that the routes take and give."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import orjson
from pydantic.json_schema import models_json_schema

from polar_gym import protocol, schema
from polar_gym.record import Record

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
JSON = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    path: str
    summary: str
    takes: type[Record] | None = None
    gives: type[Record] | None = None
    media: str = JSON
    many: bool = False
    query: Sequence[str] = ()
    key: str | None = "service"
    statuses: Sequence[int] = (200,)


ROUTES = [
    Route(method="post", path="/v1/tasks", summary="Submit a task; idempotent by task_id",
          takes=schema.TaskRequest, gives=protocol.TaskState, statuses=(200, 201)),
    Route(method="get", path="/v1/tasks", summary="Tasks, newest first", gives=protocol.TaskPage,
          query=("limit", "after", "status")),
    Route(method="get", path="/v1/tasks/{task_id}", summary="One task", gives=protocol.TaskState),
    Route(method="delete", path="/v1/tasks/{task_id}", summary="Cancel a task", gives=protocol.TaskState),
    Route(method="get", path="/v1/tasks/{task_id}/events", summary="What happens to a task; Last-Event-ID resumes",
          gives=protocol.Event, media=SSE),
    Route(method="get", path="/v1/tasks/{task_id}/episodes", summary="Episodes as they arrive, one a line",
          gives=schema.Episode, media=NDJSON, query=("after", "wait", "follow", "excluded")),
    Route(method="get", path="/v1/episodes/{session_id}", summary="The accepted episode of a session, or an attempt's",
          gives=schema.Episode, query=("attempt",)),
    Route(method="get", path="/v1/nodes", summary="Living gateway nodes", gives=protocol.NodeState, many=True),
    Route(method="post", path="/v1/generation", summary="Pause or resume model calls on all nodes",
          takes=protocol.Generation, gives=protocol.GenerationState),
    Route(method="post", path="/v1/weights", summary="The engine's weights were updated",
          takes=protocol.Weights, gives=protocol.GenerationState),
    Route(method="post", path="/v1/nodes/{node}/heartbeat", summary="A node lives",
          takes=protocol.Heartbeat, gives=protocol.HeartbeatAnswer, key="node"),
    Route(method="post", path="/v1/nodes/{node}/episodes", summary="A node delivers an episode",
          takes=protocol.Delivery, gives=protocol.DeliveryAnswer, key="node"),
    Route(method="post", path="/v1/nodes/{node}/drain", summary="Give the node nothing new",
          gives=protocol.NodeState, key="node"),
    Route(method="delete", path="/v1/nodes/{node}", summary="The node is known to be dead", key="node",
          query=("incarnation",), statuses=(204,)),
    Route(method="get", path="/healthz", summary="Whether the process works", key=None),
    Route(method="get", path="/readyz", summary="Whether a task would begin", key=None),
    Route(method="get", path="/metrics", summary="For Prometheus", key=None),
    Route(method="get", path="/openapi.json", summary="This document", key=None),
]  # fmt: skip


@functools.cache
def openapi_document() -> bytes:
    taken = {route.takes for route in ROUTES if route.takes}
    given = {route.gives for route in ROUTES if route.gives} | {protocol.ErrorAnswer, protocol.Callback}
    modes = [(record, "validation") for record in taken] + [(record, "serialization") for record in given]
    modes.sort(key=lambda pair: (pair[0].__name__, pair[1]))
    references, definitions = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _operation(route, references)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "polar-gym rollout service", "version": version("polar-gym")},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {f"{name}Key": {"type": "http", "scheme": "bearer"} for name in ("service", "node")},
        },
    }
    return orjson.dumps(document, option=orjson.OPT_INDENT_2)


def _operation(route: Route, references: dict[Any, Any]) -> dict[str, Any]:
    error = {"schema": references[protocol.ErrorAnswer, "serialization"]}
    answer: dict[str, Any] = {"description": "done"}
    if route.gives is not None:
        shape = references[route.gives, "serialization"]
        answer["content"] = {route.media: {"schema": {"type": "array", "items": shape} if route.many else shape}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "parameters": [
            *(_parameter(part[1:-1], "path") for part in route.path.split("/") if part.startswith("{")),
            *(_parameter(name, "query") for name in route.query),
        ],
        "responses": {
            **{str(status): answer for status in route.statuses},
            "default": {"description": "refused", "content": {JSON: error}},
        },
    }
    if route.takes is not None:
        shape = references[route.takes, "validation"]
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": shape}}}
    if route.key is not None:
        operation["security"] = [{f"{route.key}Key": []}]
    if route.takes is schema.TaskRequest:
        told = references[protocol.Callback, "serialization"]
        hook = {"post": {"requestBody": {"content": {JSON: {"schema": told}}}, "responses": {"2XX": {"description": "received"}}}}  # fmt: skip  # noqa: E501
        operation["callbacks"] = {"result": {"{$request.body#/callback_url}": hook}}
    return operation


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
