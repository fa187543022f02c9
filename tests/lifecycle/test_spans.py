"""OpenTelemetry spans of a session, as a collector gets them from the official exporter."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from polar_gym.config.loading import load_config
from polar_gym.engines.embedded import EmbeddedEngine, EmbeddedOptions, Script
from polar_gym.errors import ConfigError
from polar_gym.gateway.node.node import Node
from polar_gym.schema import Episode, RuntimeSpec, Workspace
from polar_gym.spans import MODULE
from tests.support.requirements import need_bubblewrap
from tests.support.sessions import asking, task

requests = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
attributes = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")


class Collector:
    """Takes spans as an OTLP collector does."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()

    async def take(self, request: web.Request) -> web.Response:
        sent = requests.ExportTraceServiceRequest.FromString(await request.read())
        for resource in sent.resource_spans:
            self.services |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]
        return web.Response(body=requests.ExportTraceServiceResponse().SerializeToString())


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    collector, app = Collector(), web.Application()
    app.router.add_post("/v1/traces", collector.take)
    async with TestServer(app) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", str(server.make_url("/")).rstrip("/"))
        yield collector


async def rolled_out(tmp_path: Path, spans: Any, **fields: Any) -> Episode:
    need_bubblewrap()
    engine = EmbeddedEngine(EmbeddedOptions(scripts=[Script(final_message="word " * 20)]))
    async with Node(engine, cache=tmp_path / "cache", spans=spans) as node:
        return await node.rollout(task(**fields))


def told(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def test_a_session_its_stages_and_its_calls_are_one_trace(tmp_path: Path, collector: Collector) -> None:
    episode = await rolled_out(tmp_path, "otel", agent=asking("ask(); ask(temperature=0.5)"))
    by_name = {span.name: span for span in collector.spans}
    session = by_name["invoke_agent command"]
    calls = [span for span in collector.spans if span.name == "chat policy"]
    assert len(calls) == 2
    assert {"init", "running", "building", "evaluating"} <= set(by_name)
    for span in collector.spans:
        assert span.trace_id == session.trace_id
        assert span is session or span.parent_span_id == session.span_id
        assert session.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    running = by_name["running"]
    for span in calls:
        assert running.start_time_unix_nano <= span.end_time_unix_nano
        assert told(span)["gen_ai.conversation.id"] == episode.session.session_id
    sampled = sum(told(span)["gen_ai.usage.output_tokens"] for span in calls)
    assert told(session)["polar_gym.tokens.sampled"] == sampled == episode.trajectory.fidelity.sampled_tokens > 0
    assert collector.services == {"polar-gym"}
    names = {name for span in collector.spans for name in told(span)}
    known = {value for name, value in vars(attributes).items() if name.startswith("GEN_AI")}
    assert {name for name in names if name.startswith("gen_ai.")} <= known, "names of the conventions"


async def test_a_failed_session_is_an_error_with_its_kind(tmp_path: Path, collector: Collector) -> None:
    """Guards against sessions that are missing from the traces because they had no reward."""
    missing = RuntimeSpec(name="bubblewrap", workspace=Workspace(source=str(tmp_path / "gone")))
    episode = await rolled_out(tmp_path, "otel", runtime=missing)
    assert episode.session.failure is not None
    (session,) = [span for span in collector.spans if span.name == "invoke_agent command"]
    assert told(session)["error.type"] == episode.session.failure.kind
    assert session.status.message == episode.session.failure.message


async def test_without_the_setting_nothing_is_sent(tmp_path: Path, collector: Collector) -> None:
    await rolled_out(tmp_path, "none")
    assert collector.spans == []


async def test_a_collector_that_is_away_costs_no_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    assert (await rolled_out(tmp_path, "otel")).session.failure is None


def test_a_missing_package_is_named_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == MODULE else find(name))
    with pytest.raises(ConfigError, match=r"rollout\.spans=otel: opentelemetry.* is missing; install: pip install"):
        load_config("demo", ["rollout.spans=otel"])
