"""Metrics of a service: each is registered in one line, at zero, and most are read only when scraped.

Prometheus' text format comes from `prometheus_client`, imported when it is needed: a machine that only runs
models does not have it. Its own counters are not used, since a lock is too much for what happens with each
token.
"""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, Literal, TypeVar

from triptych_kit.version import installed_version

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

logger = logging.getLogger(__name__)

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
# Further label values of one metric are counted together under this name.
OTHER = "other"
MAX_SERIES = 256

T = TypeVar("T")
LabelValues = tuple[str, ...]
Reading = float | Mapping[LabelValues, float]
Kind = Literal["counter", "gauge", "histogram"]


class Counts:
    """Events counted by label values. `zeros`: those that appear before any event."""

    def __init__(self, zeros: Mapping[LabelValues, float] | None = None) -> None:
        self.values = dict(zeros or {})

    def add(self, *labels: str, by: float = 1) -> None:
        if labels not in self.values:
            labels = _bounded(labels, self.values)
        self.values[labels] = self.values.get(labels, 0) + by


class Distribution:
    """Values counted by bucket. `buckets` are upper bounds; the last count is of values above all of them."""

    __slots__ = ("_buckets", "counts", "sum")

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self._buckets, value)] += times
        self.sum += value * times


class Distributions:
    """A distribution for each combination of label values, which appears at zero once it is asked for."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._buckets = buckets
        self.values: dict[LabelValues, Distribution] = {}

    def of(self, *labels: str) -> Distribution:
        if labels not in self.values:
            labels = _bounded(labels, self.values)
        return self.values.setdefault(labels, Distribution(self._buckets))


def _bounded(labels: LabelValues, values: Mapping[LabelValues, object]) -> LabelValues:
    return labels if len(values) < MAX_SERIES else (OTHER,) * len(labels)


@dataclass(frozen=True, slots=True)
class Family:
    """A registered metric. Its values have the fixed labels of all, then its own.

    convention: how OTLP has it, if that differs.
    """

    name: str
    kind: Kind
    help: str
    labels: LabelValues
    aliases: tuple[str, ...]
    buckets: tuple[float, ...]
    read: Callable[[], float | Mapping[LabelValues, float | Distribution]]
    convention: Convention | None = None


@dataclass(frozen=True, slots=True)
class Convention:
    """The name, the unit and the labels of a metric by OpenTelemetry's conventions."""

    name: str
    unit: str
    labels: LabelValues


@dataclass(frozen=True, slots=True)
class Row(Generic[T]):
    """A line of a table of metrics; `read` takes the object that has the values."""

    kind: Kind
    name: str
    read: Callable[[T], float | Mapping[LabelValues, float | Distribution]]
    help: str
    labels: LabelValues = ()
    aliases: LabelValues = ()
    buckets: tuple[float, ...] = ()


class Metrics:
    """The metrics of one service. Belongs to the event loop, as does all that its `read` functions use.

    labels: of every metric, with their values.
    A name under `aliases` has the same values; it is for dashboards that read other servers' metrics.
    """

    def __init__(self, service: str, labels: Mapping[str, str] | None = None) -> None:
        self.families: dict[str, Family] = {}
        self.labels = dict(labels or {})
        version = installed_version()
        self.gauge(
            "triptych_build_info",
            "Version of the service; always 1.",
            lambda: {(service, version): 1},
            labels=("service", "version"),
        )

    def gauge(
        self,
        name: str,
        help: str,
        read: Callable[[], Reading],
        *,
        labels: LabelValues = (),
        aliases: LabelValues = (),
    ) -> None:
        """A value that `read` returns, or, with `labels`, one for each tuple of their values."""
        self._add(Family(name, "gauge", help, labels, aliases, (), read))

    def counter(
        self,
        name: str,
        help: str,
        read: Callable[[], Reading],
        *,
        labels: LabelValues = (),
        aliases: LabelValues = (),
    ) -> None:
        """Register a value that only grows, with the arguments of `gauge`."""
        self._add(Family(name, "counter", help, labels, aliases, (), read))

    def counts(
        self,
        name: str,
        help: str,
        *,
        labels: LabelValues = (),
        aliases: LabelValues = (),
        zeros: Iterable[LabelValues] = (),
    ) -> Counts:
        """A counter of events that no object counts. `zeros`: label values that appear before any event."""
        counts = Counts(dict.fromkeys(zeros if labels else [()], 0))
        self.counter(name, help, lambda: counts.values, labels=labels, aliases=aliases)
        return counts

    def histogram(
        self,
        name: str,
        help: str,
        buckets: Sequence[float],
        *,
        labels: LabelValues = (),
        aliases: LabelValues = (),
    ) -> Distributions:
        """Distributions over `buckets`, upper bounds in ascending order. Without labels, use `of()`."""
        distributions = Distributions(buckets)
        if not labels:
            distributions.of()
        self.distribution(name, help, buckets, lambda: distributions.values, labels=labels, aliases=aliases)
        return distributions

    def conventional_histogram(
        self, name: str, help: str, buckets: Sequence[float], *, unit: str, labels: LabelValues
    ) -> Distributions:
        """A histogram that OpenTelemetry's conventions define, with dots in its name and labels.

        Prometheus has it by OpenTelemetry's rules for names: underscores, and the unit at the end.
        """
        distributions = Distributions(buckets)
        suffix = "_seconds" if unit == "s" else ""
        self._add(
            Family(
                name.replace(".", "_") + suffix,
                "histogram",
                help,
                tuple(label.replace(".", "_") for label in labels),
                (),
                tuple(buckets),
                lambda: distributions.values,
                Convention(name, unit, labels),
            )
        )
        return distributions

    def distribution(
        self,
        name: str,
        help: str,
        buckets: Sequence[float],
        read: Callable[[], Mapping[LabelValues, Distribution]],
        *,
        labels: LabelValues = (),
        aliases: LabelValues = (),
    ) -> None:
        """A histogram of distributions that another object keeps."""
        self._add(Family(name, "histogram", help, labels, aliases, tuple(buckets), read))

    def table(self, rows: Iterable[Row[T]], source: Callable[[], T]) -> None:
        """Register each row. Its `read` gets what `source` returns when the metrics are scraped."""
        for row in rows:
            read = functools.partial(_read_row, row, source)
            self._add(Family(row.name, row.kind, row.help, row.labels, row.aliases, row.buckets, read))

    def _add(self, family: Family) -> None:
        if family.name in self.families:
            raise ValueError(f"metric {family.name} is registered already")
        self.families[family.name] = family

    def collect(self, *, with_aliases: bool = True, by_convention: bool = False) -> Iterator[Metric]:
        """All metrics as Prometheus knows them. by_convention: with names and labels of the conventions."""
        from prometheus_client import ProcessCollector

        yield from ProcessCollector(registry=None).collect()
        for family in list(self.families.values()):
            try:
                reading = family.read()
            except Exception:
                # One that cannot be read must not hide the others.
                logger.exception("metric cannot be read", extra={"metric": family.name})
                continue
            values: Mapping[LabelValues, float | Distribution]
            values = reading if isinstance(reading, Mapping) else {(): reading}
            if by_convention and family.convention is not None:
                convention = family.convention
                metric = self._metric(convention.name, convention.labels, family, values)
                metric.unit = convention.unit
                yield metric
                continue
            for name in (family.name, *(family.aliases if with_aliases else ())):
                yield self._metric(name, family.labels, family, values)

    def _metric(
        self,
        name: str,
        labels: LabelValues,
        family: Family,
        values: Mapping[LabelValues, float | Distribution],
    ) -> Metric:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        names = (*self.labels, *labels)
        if family.kind == "histogram":
            histogram = HistogramMetricFamily(name, family.help, labels=names)
            bounds = [*map(_bound, family.buckets), "+Inf"]
            for of_value, value in values.items():
                if isinstance(value, Distribution):
                    counts = zip(bounds, accumulate(value.counts), strict=True)
                    histogram.add_metric((*self.labels.values(), *of_value), list(counts), value.sum)
            return histogram
        metric = (CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily)(
            name, family.help, labels=names
        )
        for of_value, value in values.items():
            if not isinstance(value, Distribution):
                metric.add_metric((*self.labels.values(), *of_value), value)
        return metric


def _read_row(row: Row[T], source: Callable[[], T]) -> float | Mapping[LabelValues, float | Distribution]:
    return row.read(source())


def _bound(value: float) -> str:
    return str(float(value))


class _Collected:
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def to_text(metrics: Iterable[Metric]) -> bytes:
    """The metrics in Prometheus' text format."""
    from prometheus_client import generate_latest

    return generate_latest(_Collected(metrics))
