"""What Prometheus is told of the rollout book."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from polar_gym.protocol import TaskStatus
from polar_gym.service.task import Verdict

if TYPE_CHECKING:
    from polar_gym.service.book import Book


class Metrics(Collector):
    """Counters of what happened; gauges are read from the book when Prometheus asks."""

    def __init__(self, book: Book) -> None:
        self._book = book
        registry = self._registry = CollectorRegistry()
        self._dispatched = Counter("polar_gym_dispatched_sessions", "Sessions that nodes took", registry=registry)
        self._retried = Counter("polar_gym_retried_sessions", "Sessions that were begun again", registry=registry)
        self._episodes = Counter("polar_gym_episodes", "Delivered episodes", ["result"], registry=registry)
        self._tasks = Counter("polar_gym_ended_tasks", "Tasks that ended", ["status"], registry=registry)
        self._callbacks = Counter("polar_gym_callbacks", "Tries to deliver one", ["outcome"], registry=registry)
        self._registry.register(self)

    def dispatched(self) -> None:
        self._dispatched.inc()

    def retried(self) -> None:
        self._retried.inc()

    def episode(self, verdict: Verdict) -> None:
        self._episodes.labels("accepted" if verdict.accepted else "excluded").inc()

    def task_ended(self, status: TaskStatus) -> None:
        self._tasks.labels(status.value).inc()

    def callback(self, outcome: str) -> None:
        self._callbacks.labels(outcome).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        book = self._book
        tasks = Count(task.status.value for task in book.live.values())
        samples = Count(sample.phase.value for task in book.live.values() for sample in task.samples.values())
        yield _gauge("polar_gym_live_tasks", "Tasks that have not ended", "status", tasks)
        yield _gauge("polar_gym_samples", "Samples of tasks that have not ended", "phase", samples)
        for stage in ("init", "ready", "run", "postrun"):
            held, places = Count[str](), Count[str]()
            for name, member in book.fleet.members.items():
                held[name] = getattr(member.heartbeat.held, stage)
                places[name] = getattr(member.heartbeat.places, stage)
            yield _gauge(f"polar_gym_held_{stage}", f"Sessions in {stage}", "node", held)
            yield _gauge(f"polar_gym_places_{stage}", f"Places in {stage}", "node", places)
        yield GaugeMetricFamily("polar_gym_nodes", "Living nodes", value=len(book.fleet.members))
        yield GaugeMetricFamily("polar_gym_stored_bytes", "Bytes of stored episodes", value=book.stored_bytes)


def _gauge(name: str, help_text: str, label: str, values: Count[str]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=[label])
    for value, count in values.items():
        family.add_metric([value], count)
    return family
