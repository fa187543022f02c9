"""Makes the OpenAPI 3.1 document of the rollout server from its routes and their records."""

from __future__ import annotations

import functools
from importlib.metadata import version
from typing import Any

import orjson
from pydantic.json_schema import models_json_schema

from polar_gym import protocol, schema
from polar_gym.http.route import JSON, Route


@functools.cache
def openapi_document(routes: tuple[Route[Any], ...]) -> bytes:
    taken = {route.takes for route in routes if route.takes}
    given = {route.gives for route in routes if route.gives} | {protocol.ErrorAnswer, protocol.Callback}
    modes = [(record, "validation") for record in taken] + [(record, "serialization") for record in given]
    modes.sort(key=lambda pair: (pair[0].__name__, pair[1]))
    references, definitions = models_json_schema(modes, ref_template="#/components/schemas/{model}")  # type: ignore
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, references)
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


def _operation(route: Route[Any], references: dict[Any, Any]) -> dict[str, Any]:
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
    if route.keys:
        operation["security"] = [{f"{name}Key": []} for name in route.keys]
    if route.takes is schema.TaskRequest:
        told = references[protocol.Callback, "serialization"]
        hook = {"post": {"requestBody": {"content": {JSON: {"schema": told}}}, "responses": {"2XX": {"description": "received"}}}}  # fmt: skip  # noqa: E501
        operation["callbacks"] = {"result": {"{$request.body#/callback_url}": hook}}
    return operation


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
