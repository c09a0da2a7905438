"""The sums over workers, which are played by listeners of this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from frontend_svc.process.worker_metrics import WorkerMetrics
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.http.pages import metrics_page
from triptych_kit.process.child import Announcement
from triptych_kit.telemetry.metrics import Counts, Distribution, Metrics


class PlayedWorker:
    """One worker: what it counts, and where it says so."""

    def __init__(self, pid: int) -> None:
        metrics = Metrics("frontend")
        self.open = 0
        metrics.gauge("triptych_open", "Open.", lambda: self.open)
        self.ends: Counts = metrics.counts("triptych_ends_total", "Ends.", labels=("reason",))
        self.times: Distribution = metrics.histogram("triptych_time_seconds", "Times.", (1,)).of()
        self._listener = AdminHTTP("127.0.0.1:0", {"/metrics": metrics_page(metrics.collect)})
        self.address = Announcement(pid, "", "")

    async def start(self) -> None:
        self.address = replace(self.address, admin_http=await self._listener.start())

    async def stop(self) -> None:
        await self._listener.stop(0)


@asynccontextmanager
async def running(*workers: PlayedWorker) -> AsyncIterator[None]:
    for worker in workers:
        await worker.start()
    try:
        yield
    finally:
        for worker in workers:
            await worker.stop()


async def sums(metrics: WorkerMetrics) -> dict[str, float]:
    """The values by name and labels, of what the workers here have registered."""
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for metric in await metrics.collect()
        for sample in metric.samples
        if metric.name in ("triptych_open", "triptych_ends", "triptych_time_seconds", "triptych_build_info")
    }


async def test_counters_gauges_and_buckets_of_all_workers_add_up():
    one, two = PlayedWorker(1), PlayedWorker(2)
    one.open, two.open = 2, 3
    one.ends.add("stop", by=5)
    two.ends.add("stop")
    two.ends.add("length")
    for worker, seconds in ((one, 0.5), (two, 2)):
        worker.times.observe(seconds)
    async with running(one, two):
        found = await sums(WorkerMetrics(lambda: [one.address, two.address]))
    assert found.pop(next(name for name in found if name.startswith("triptych_build_info"))) == 1
    assert found == {
        "triptych_open": 5,
        "triptych_ends_total stop": 6,
        "triptych_ends_total length": 1,
        "triptych_time_seconds_bucket 1.0": 1,
        "triptych_time_seconds_bucket +Inf": 2,
        "triptych_time_seconds_count": 2,
        "triptych_time_seconds_sum": 2.5,
    }


async def test_no_counter_falls_when_a_worker_ends_and_another_takes_its_turn():
    one, two, three, four = (PlayedWorker(pid) for pid in (1, 2, 3, 4))
    workers = [one, two]
    metrics = WorkerMetrics(lambda: [worker.address for worker in workers])
    for worker in (one, two, three, four):
        worker.open = 1
        worker.ends.add("stop", by=10)
    async with running(one, three, four):
        async with running(two):
            before = await sums(metrics)
        away = await sums(metrics)
        workers[1] = three
        after = await sums(metrics)
        workers[1] = four
        assert (await sums(metrics))["triptych_ends_total stop"] == 40
    assert [found["triptych_ends_total stop"] for found in (before, away, after)] == [20, 20, 30]
    assert [found["triptych_open"] for found in (before, away, after)] == [2, 1, 2]
