"""The executor's statistics among Triton's own metrics."""

from typing import Any

import triton_python_backend_utils as pb_utils

from trtree.runtime.executor_metrics import COUNTERS, GAUGES
from trtree.runtime.service import Service


class Metrics:
    """One metric for each of the executors' statistics; ``update`` reads them anew."""

    def __init__(self, service: Service, model: str, version: str) -> None:
        self._service = service
        self._labels = {"model": model, "version": version}
        family = pb_utils.MetricFamily
        kinds = ((GAUGES, family.GAUGE, ""), (COUNTERS, family.COUNTER, "_total"))
        self._families = {
            name: pb_utils.MetricFamily(name=f"trtree_{name}{suffix}", description=text, kind=kind)
            for table, kind, suffix in kinds
            for name, text, _ in table
        }
        self._metrics: dict[tuple[str, int], Any] = {}
        self._counted: dict[tuple[str, int], float] = {}
        self.update()

    def update(self) -> None:
        for executor, statistics in self._service.statistics().items():
            for name, _, value in GAUGES:
                self._metric(name, executor).set(value(statistics))
            for name, _, value in COUNTERS:
                count, key = value(statistics), (name, executor)
                if more := count - self._counted.get(key, 0):
                    self._metric(name, executor).increment(more)
                    self._counted[key] = count

    def _metric(self, name: str, executor: int) -> Any:
        key = (name, executor)
        if key not in self._metrics:
            labels = self._labels | {"executor": str(executor)}
            self._metrics[key] = self._families[name].Metric(labels=labels)
        return self._metrics[key]
