"""Adds up the metrics of the worker processes of one port. Knows no metric."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from triptych_kit.http.admin_http import read_page
from triptych_kit.process.child import Announcement

logger = logging.getLogger(__name__)

_LIMIT_S = 2.0
_GROWING = frozenset({"counter", "histogram"})
# Of gauges with these endings the greatest value counts, not the sum.
_GREATEST = ("_info", "_start_time_seconds", "_max_fds")


class WorkerMetrics:
    """Metrics summed over all workers.

    Counters of a worker that has ended stay in the sums, so that these never decrease. Its gauges end, as do
    those of one that does not answer.
    addresses: of the workers in order, of which each may be another process than the one before.
    """

    def __init__(self, addresses: Callable[[], list[Announcement]]) -> None:
        self._addresses = addresses
        self._latest: dict[int, tuple[int, list[Metric]]] = {}  # pid and metrics by index
        self._ended = Sums()

    async def collect(self) -> list[Metric]:
        """Ask every worker."""
        workers = self._addresses()
        answers = await asyncio.gather(*map(_read, workers))
        sums = Sums()
        for index, (worker, answer) in enumerate(zip(workers, answers, strict=True)):
            pid, latest = self._latest.get(index, (worker.pid, []))
            if pid != worker.pid:
                self._ended.add(latest, with_gauges=False)
                latest = []
            self._latest[index] = worker.pid, latest if answer is None else answer
            sums.add(self._latest[index][1], with_gauges=answer is not None)
        sums.add(self._ended.metrics(), with_gauges=False)
        return sums.metrics()


class Sums:
    """Values added up by metric and labels."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[str, str]] = {}  # help and type by name
        self._values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}

    def add(self, metrics: Iterable[Metric], *, with_gauges: bool) -> None:
        for metric in metrics:
            self._families.setdefault(metric.name, (metric.documentation, metric.type))
            values = self._values.setdefault(metric.name, {})
            if metric.type not in _GROWING and not with_gauges:
                continue
            for sample in metric.samples:
                key = sample.name, tuple(sample.labels.items())
                before = values.get(key, 0.0)
                is_greatest = sample.name.endswith(_GREATEST)
                values[key] = max(before, sample.value) if is_greatest else before + sample.value

    def metrics(self) -> list[Metric]:
        return [
            _metric(name, text, kind, self._values[name]) for name, (text, kind) in self._families.items()
        ]


def _metric(
    name: str, text: str, kind: str, values: Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
) -> Metric:
    metric = Metric(name, text, kind)
    metric.samples = [Sample(sample, dict(labels), value) for (sample, labels), value in values.items()]
    return metric


async def _read(worker: Announcement) -> list[Metric] | None:
    try:
        text = await read_page(worker.admin_http, "/metrics", limit_s=_LIMIT_S)
    except OSError as error:
        logger.info("worker does not answer", extra={"worker_pid": worker.pid, "reason": str(error)})
        return None
    return list(text_string_to_metric_families(text.decode()))
