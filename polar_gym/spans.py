"""OpenTelemetry spans of finished sessions: one for the session, and below it one for each stage and each model call.

Names and attributes follow OpenTelemetry's conventions for generative AI: `invoke_agent` is the session, `chat` a call,
`gen_ai.evaluation.result` the reward. Other attributes begin with `polar_gym.`. A conversation's messages are not sent;
why a session or a call failed is, and may quote what the harness printed. Stages follow one another from the session's
beginning, each as long as `Timing` says.

Where a program has set up an SDK, its provider gets the spans. Else they go to an OTLP collector over HTTP, which the
variables `OTEL_EXPORTER_OTLP_*` and `OTEL_SERVICE_NAME` name.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from polar_gym.errors import ConfigError, how_to_install
from polar_gym.schema import EngineInfo, Episode, ModelCall

Spans = Literal["none", "otel"]
Emit = Callable[[Episode, Sequence[ModelCall], float], None]
"""Takes an episode, its calls, and the session's beginning in Unix time."""

MODULE = "opentelemetry.exporter.otlp.proto.http"
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed", "presence_penalty", "frequency_penalty")


def check_installed(spans: Spans) -> None:
    """Raise `ConfigError` where a package is missing."""
    try:
        missing = spans == "otel" and importlib.util.find_spec(MODULE) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ConfigError(f"rollout.spans=otel: {MODULE} is missing; install: {how_to_install('otel')}")


def open_spans() -> tuple[Emit, Callable[[], object]]:
    """Return the function that emits the spans of a session, and one that sends what waits and ends. The latter blocks
    for some seconds where no collector answers."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    given = trace.get_tracer_provider()
    if isinstance(given, TracerProvider):
        provider, close = given, given.force_flush
    else:
        name = os.environ.get("OTEL_SERVICE_NAME", "polar-gym")
        provider = TracerProvider(resource=Resource.create({"service.name": name}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        close = provider.shutdown
    tracer = provider.get_tracer("polar_gym")

    def emit(episode: Episode, calls: Sequence[ModelCall], began: float) -> None:
        session, engine = episode.session, episode.engine
        whole = tracer.start_span(
            f"invoke_agent {session.harness}", start_time=_ns(began), attributes=_of_session(episode)
        )
        inside = trace.set_span_in_context(whole)
        start = began
        for stage, seconds in session.timing.stages().items():
            if seconds is not None:
                span = tracer.start_span(stage, inside, start_time=_ns(start))
                start += seconds
                span.end(_ns(start))
        for call in calls:
            name, client = f"chat {call.model}", trace.SpanKind.CLIENT
            of_call = _of_call(call, engine)
            span = tracer.start_span(name, inside, client, attributes=of_call, start_time=_ns(call.started_at))
            if call.outcome == "failed":
                span.set_status(trace.StatusCode.ERROR, call.error)
            span.end(_ns(call.started_at + call.duration))
        if session.failure is not None:
            whole.set_status(trace.StatusCode.ERROR, session.failure.message)
        if episode.evaluation is not None:
            score = {
                "gen_ai.evaluation.name": episode.evaluation.evaluator,
                "gen_ai.evaluation.score.value": episode.evaluation.reward,
                "gen_ai.evaluation.explanation": episode.evaluation.detail,
            }
            whole.add_event("gen_ai.evaluation.result", score)
        whole.end(_ns(time.time()))

    return emit, close


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}


def _of_session(episode: Episode) -> dict[str, Any]:
    session, fidelity = episode.session, episode.trajectory.fidelity
    return _known(
        {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": session.harness,
            "gen_ai.conversation.id": session.session_id,
            "error.type": session.failure.kind if session.failure is not None else None,
            "polar_gym.task": session.task_id,
            "polar_gym.sample": session.sample_index,
            "polar_gym.attempt": session.attempt,
            "polar_gym.node": session.node,
            "polar_gym.status": session.status.value,
            "polar_gym.truncated_by": session.truncated_by,
            "polar_gym.weight_version": session.weight_version,
            "polar_gym.tokens.sampled": fidelity.sampled_tokens,
            "polar_gym.tokens.trainable": fidelity.trainable_tokens,
            "polar_gym.traces": len(episode.trajectory.traces),
        }
    )


def _of_call(call: ModelCall, engine: EngineInfo) -> dict[str, Any]:
    finish = [call.finish_reason] if call.finish_reason is not None else None
    return _known(
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": engine.name,
            "gen_ai.conversation.id": call.session_id,
            "gen_ai.request.model": call.model,
            "gen_ai.response.model": engine.model,
            "gen_ai.response.id": call.call_id,
            "gen_ai.response.finish_reasons": finish,
            "gen_ai.usage.input_tokens": len(call.prompt_ids),
            "gen_ai.usage.output_tokens": len(call.response_ids),
            "gen_ai.usage.cache_read.input_tokens": call.cached_tokens,
            **{f"gen_ai.request.{name}": call.sampling.get(name) for name in SAMPLING},
            "error.type": (call.error_kind or "_OTHER") if call.outcome == "failed" else None,
            "url.full": call.engine_url,
            "polar_gym.kind": call.kind,
            "polar_gym.outcome": call.outcome,
            "polar_gym.continuation": call.continuation,
            "polar_gym.splice_cause": call.splice_cause,
            "polar_gym.weight_versions": [span.version for span in call.weight_versions] or None,
        }
    )
