"""The verbs `ray place` and `ray drain`, from their arguments to their exit codes. Needs the extra `ray`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from launcher.ray_cluster import ClusterAway, RayCluster, connect, disconnect, find_host
from launcher.ray_config import Placing
from launcher.ray_placement import EngineDied, HostLost, Placement, limits_of
from launcher.readiness import await_ready
from launcher.supervisor import StartTimeout

_USAGE_ERROR = 2


def run_place(placing: Placing) -> int:
    """Place engines and keep them running until a signal, or until all were drained: 0.

    Returns 1 if one cannot be started or keeps dying, 2 if there is no cluster.
    """
    config = placing.config
    if config.ready_file:
        # Left by an earlier run, it would say ready too early.
        Path(config.ready_file).unlink(missing_ok=True)
    try:
        connect(config.ray_address)
    except ClusterAway as error:
        _report(str(error))
        return _USAGE_ERROR
    try:
        return asyncio.run(_place(placing))
    finally:
        disconnect()


def run_drain(address: str, names: list[str], limit_s: float) -> int:
    """Drain engines by name and print how each ended; 1 unless all with 0, 2 if there is no cluster."""
    try:
        connect(address)
    except ClusterAway as error:
        _report(str(error))
        return _USAGE_ERROR
    try:
        return asyncio.run(_drain(names, limit_s))
    finally:
        disconnect()


async def _place(placing: Placing) -> int:
    placement = Placement(
        placing,
        RayCluster(placing.config),
        await_ready=await_ready,
        report=_report,
        on_change=lambda: _write_ready_file(placing, placement),
        limits=limits_of(placing),
    )
    stopping = _stop_on_signals(placement)
    running = asyncio.ensure_future(_run(placing, placement))
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    except (EngineDied, HostLost, StartTimeout) as error:
        _report(str(error))
        return 1
    finally:
        running.cancel()
        await asyncio.wait((running,))
        await placement.stop()
    return 0


async def _run(placing: Placing, placement: Placement) -> None:
    await placement.start()
    _report(f"{placing.config.num_engines} engines are ready")
    await placement.keep_running()


async def _drain(names: list[str], limit_s: float) -> int:
    async def drain_one(name: str) -> bool:
        try:
            status = await find_host(name).drain(limit_s)
        except HostLost as lost:
            _report(f"{name}: {lost}")
            return False
        print(f"{name} ended with {status}", flush=True)
        return status == 0

    return 0 if all(await asyncio.gather(*map(drain_one, names))) else 1


def _stop_on_signals(placement: Placement) -> asyncio.Future[None]:
    """A future that the first SIGTERM or SIGINT resolves; the second one cuts the drains."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[None] = loop.create_future()
    hurrying: set[asyncio.Task[None]] = set()

    def on_signal() -> None:
        if stopping.done():
            hurrying.add(loop.create_task(placement.hurry()))
        else:
            stopping.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stopping


def _write_ready_file(placing: Placing, placement: Placement) -> None:
    if placing.config.ready_file is None:
        return
    path = Path(placing.config.ready_file)
    engines = [
        {
            "name": name,
            "address": place.address,
            "admin_address": place.admin_address,
            "node_id": place.node_id,
            "pid": place.pid,
            "devices": place.devices,
        }
        for name, place in sorted(placement.places.items())
    ]
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps({"engines": engines}, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(path)


def _report(line: str) -> None:
    print(f"[ray] {line}", file=sys.stderr, flush=True)
