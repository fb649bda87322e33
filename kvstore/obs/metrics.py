"""Metrics of a process: a thin helper over prometheus_client with a registry of its own.

No global registry: tests run several masters and workers in one process, and LMCache has metrics of its own. Names get
the prefix ``kvstore_`` and end with their unit (``_bytes``, ``_seconds``); counters end with ``_total``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

NAMESPACE: Final = "kvstore"
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
# From a cached look-up (0.1 ms) to the longest guard around a FUSE operation (30 s), about ×2.5 a step.
LATENCY_BUCKETS_S: Final = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 30)

Sample = tuple[Sequence[str], float]
"""Label values and a number."""


class Metrics:
    """The metrics of one process or component, and their text for Prometheus."""

    def __init__(self, component: str, version: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        # Named kvstore_process_…: one box runs several components, and their dashboards filter by our prefix.
        ProcessCollector(namespace=NAMESPACE, registry=self.registry)
        build = Info("build", "Component and version", namespace=NAMESPACE, registry=self.registry)
        build.info({"component": component, "version": version})

    def counter(self, name: str, help: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows; ``_total`` is added to its name."""
        return Counter(name, help, labels, namespace=NAMESPACE, registry=self.registry)

    def gauge(self, name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
        """A number that is set, or moves both ways."""
        return Gauge(name, help, labels, namespace=NAMESPACE, registry=self.registry)

    def histogram(
        self, name: str, help: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        """A distribution; by default of seconds."""
        return Histogram(name, help, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A gauge without labels that is read when somebody asks for it."""
        self.watch_many(name, help, (), lambda: [((), read())])

    def watch_many(self, name: str, help: str, labels: Sequence[str], read: Callable[[], Iterable[Sample]]) -> None:
        """A gauge whose samples are read when somebody asks: labels that are gone leave no stale series behind."""
        self.registry.register(_Reader(GaugeMetricFamily, f"{NAMESPACE}_{name}", help, labels, read))

    def count(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A counter without labels that is counted elsewhere; ``_total`` is added to its name."""
        self.count_many(name, help, (), lambda: [((), read())])

    def count_many(self, name: str, help: str, labels: Sequence[str], read: Callable[[], Iterable[Sample]]) -> None:
        """A counter that is counted elsewhere and read when somebody asks; ``_total`` is added to its name."""
        self.registry.register(_Reader(CounterMetricFamily, f"{NAMESPACE}_{name}", help, labels, read))

    def render(self) -> bytes:
        """The text that Prometheus scrapes, of type `CONTENT_TYPE`."""
        return generate_latest(self.registry)


Family = GaugeMetricFamily | CounterMetricFamily


class _Reader(Collector):
    def __init__(
        self, kind: type[Family], name: str, help: str, labels: Sequence[str], read: Callable[[], Iterable[Sample]]
    ) -> None:
        self._kind, self._family, self._labels, self._read = kind, (name, help), labels, read

    def describe(self) -> Iterable[Family]:
        """The name alone, so that registering does not read."""
        return [self._empty()]

    def collect(self) -> Iterable[Family]:
        family = self._empty()
        for values, number in self._read():
            family.add_metric(values, number)
        return [family]

    def _empty(self) -> Family:
        return self._kind(*self._family, labels=self._labels)
