"""The metrics of a node, read from the node whenever Prometheus asks. The event loop's lag is measured all the time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import partial

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from polar_gym.gateway.node.service import NodeService
from polar_gym.protocol import StageCounts

LAG_EVERY_SECONDS = 0.5
"""The time between two measurements of the event loop's lag."""


class NodeMetrics:
    """A collector of prometheus_client."""

    def __init__(self, service: NodeService) -> None:
        self._service = service
        self._lag = 0.0
        """The longest lag since Prometheus last asked."""

    async def watch_the_loop(self) -> None:
        """Measure how late the event loop runs its work."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_EVERY_SECONDS
            await asyncio.sleep(LAG_EVERY_SECONDS)
            self._lag = max(self._lag, loop.time() - due)

    def collect(self) -> Iterator[Metric]:
        service, node = self._service, self._service.node
        proxy = node.proxy
        yield _by_stage("polar_gym_places", "Places by stage.", node.stages.places)
        yield _by_stage("polar_gym_held", "Sessions that hold a place, by stage.", node.stages.held)
        statuses = Counter(session.status.value for session in service.sessions)
        sandboxes = Counter(held=len(node.census.held), left=len(node.census.left))
        yield gauges("polar_gym_sandboxes", "Sandboxes that sessions hold, and that are left.", "state", sandboxes)
        yield gauges("polar_gym_sessions", "Sessions that are held and not delivered.", "status", statuses)
        yield GaugeMetricFamily("polar_gym_waiting", "Sessions that wait for INIT.", value=node.stages.init.waiting)
        yield counters("polar_gym_ended", "Sessions that ended, by status.", "status", service.ended_by_status)
        yield counters("polar_gym_failures", "Sessions that failed, by kind.", "kind", service.failures)
        yield counters("polar_gym_calls", "Model calls, by outcome; refused: not recorded.", "outcome", proxy.calls)
        yield CounterMetricFamily("polar_gym_sampled_tokens", "Tokens received.", value=proxy.sampled_tokens)
        yield GaugeMetricFamily("polar_gym_calls_in_flight", "Calls at the engine.", value=proxy.generation.in_flight)
        yield GaugeMetricFamily("polar_gym_paused", "1: calls wait.", value=float(proxy.generation.paused))
        yield GaugeMetricFamily("polar_gym_loop_lag_seconds", "The longest since the last scrape.", value=self._lag)
        self._lag = 0.0


def _by_stage(name: str, help_text: str, counts: StageCounts) -> Metric:
    return gauges(name, help_text, "stage", Counter(counts.model_dump()))


def by_label(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, help_text: str, label: str, values: Counter[str]
) -> Metric:
    """Return a metric with one value for each value of `label`."""
    family = kind(name, help_text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family


gauges = partial(by_label, GaugeMetricFamily)
counters = partial(by_label, CounterMetricFamily)
