"""Prometheus metrics. Counts that the executor keeps are read from it, not kept again."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trtree.runtime.executor_metrics import COUNTERS, GAUGES
from trtree.runtime.service import Finished, Service

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LENGTHS = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)


class Metrics:
    """A registry of its own, filled from what the service reports."""

    def __init__(self, service: Service) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_ExecutorCollector(service))
        self._requests = Counter(
            "trtree_requests", "Outputs by how they ended", ["outcome"], registry=registry
        )
        self._responses = Counter(
            "trtree_http_responses", "HTTP responses by status", ["code"], registry=registry
        )
        self._first = Histogram(
            "trtree_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._per_token = Histogram(
            "trtree_time_per_output_token_seconds",
            "Between an output's tokens, on average",
            buckets=_SECONDS,
            registry=registry,
        )
        self._queue = Histogram(
            "trtree_queue_seconds",
            "From a request's arrival to its admission",
            buckets=_SECONDS,
            registry=registry,
        )
        self._acceptance = Histogram(
            "trtree_acceptance_length",
            "Tokens per verify pass of each output",
            buckets=_LENGTHS,
            registry=registry,
        )
        service.observers.append(self._on_finished)

    def on_response(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def render(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def _on_finished(self, finished: Finished) -> None:
        usage = finished.finish.usage
        self._requests.labels(finished.finish.reason).inc()
        if usage.statistics is not None:
            self._queue.observe(usage.statistics.queue_seconds)
            if usage.statistics.verify_forwards:
                self._acceptance.observe(usage.statistics.acceptance_length)
        if finished.first_token is not None:
            self._first.observe(finished.first_token - finished.submitted)
            if usage.completion_tokens > 1:
                seconds = finished.finished - finished.first_token
                self._per_token.observe(seconds / (usage.completion_tokens - 1))


class _ExecutorCollector(Collector):
    """The executors' own statistics, as of the scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        statistics = self._service.statistics()
        for name, text, value in GAUGES:
            gauge = GaugeMetricFamily(f"trtree_{name}", text, labels=["executor"])
            for index, one in statistics.items():
                gauge.add_metric([str(index)], value(one))
            yield gauge
        for name, text, value in COUNTERS:
            counter = CounterMetricFamily(f"trtree_{name}", text, labels=["executor"])
            for index, one in statistics.items():
                counter.add_metric([str(index)], value(one))
            yield counter
