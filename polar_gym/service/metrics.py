"""The metrics of the rollout server, read from the book whenever Prometheus asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from polar_gym.gateway.node.metrics import counters, gauges
from polar_gym.protocol import StageCounts
from polar_gym.service.book import Book


class ServiceMetrics:
    """A collector of prometheus_client."""

    def __init__(self, book: Book) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        book, counts = self._book, self._book.counts
        yield CounterMetricFamily("polar_gym_dispatched_sessions", "Sessions that nodes took", value=counts.dispatched)
        yield CounterMetricFamily("polar_gym_retried_sessions", "Sessions that were begun again", value=counts.retried)
        yield counters("polar_gym_episodes", "Delivered episodes", "result", counts.episodes)
        yield counters("polar_gym_ended_tasks", "Tasks that ended", "status", counts.tasks)
        yield counters("polar_gym_callbacks", "Tries to deliver a callback", "outcome", counts.callbacks)
        tasks = Counter(task.status.value for task in book.live.values())
        samples = Counter(sample.phase.value for task in book.live.values() for sample in task.samples.values())
        yield gauges("polar_gym_live_tasks", "Tasks that have not ended", "status", tasks)
        yield gauges("polar_gym_samples", "Samples of tasks that have not ended", "phase", samples)
        beats = {name: member.heartbeat for name, member in book.fleet.members.items()}
        for stage in StageCounts.model_fields:
            held = Counter({name: getattr(beat.held, stage) for name, beat in beats.items()})
            places = Counter({name: getattr(beat.places, stage) for name, beat in beats.items()})
            yield gauges(f"polar_gym_held_{stage}", f"Sessions in {stage}", "node", held)
            yield gauges(f"polar_gym_places_{stage}", f"Places in {stage}", "node", places)
        yield GaugeMetricFamily("polar_gym_nodes", "Living nodes", value=len(beats))
        yield GaugeMetricFamily("polar_gym_stored_bytes", "Bytes of stored episodes", value=book.stored_bytes)
