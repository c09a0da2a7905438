"""The verbs `ray place` and `ray drain`, from their arguments to their exit codes. Needs the extra `ray`."""

from __future__ import annotations

import asyncio
import signal

from triptych_cli.ray.cluster import ClusterAway, RayCluster, connect, disconnect, find_host
from triptych_cli.ray.config import Placing
from triptych_cli.ray.placement import EngineDied, HostLost, Placement, limits_of
from triptych_cli.serve.readiness import await_ready
from triptych_cli.serve.ready_file import remove_ready_file, write_ready_file
from triptych_cli.serve.supervisor import StartTimeout
from triptych_kit.process.supervision import run_until_signal
from triptych_kit.telemetry.logs import write_log_line

_USAGE_ERROR = 2


def run_place(placing: Placing) -> int:
    """Place engines and keep them running until a signal, or until all are drained. Returns 0;

    1 if an engine cannot be started or keeps dying; 2 if there is no cluster.
    """
    config = placing.config
    remove_ready_file(config.ready_file)
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
    """Drain engines by name, print how each ended. Returns 0; 1 if an exit code is not 0; 2 if no cluster."""
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

    async def stop(number: signal.Signals | None) -> None:
        remove_ready_file(placing.config.ready_file)
        await placement.stop()

    return await run_until_signal(
        _run(placing, placement),
        stop=stop,
        hurry=placement.hurry,
        failures=(EngineDied, HostLost, StartTimeout),
        on_failure=_report_failure,
    )


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


def _write_ready_file(placing: Placing, placement: Placement) -> None:
    engines = [
        {
            "name": name,
            "address": place.address,
            "admin_address": place.admin_address,
            "admin_http": place.admin_http,
            "node_id": place.node_id,
            "pid": place.pid,
            "devices": place.devices,
        }
        for name, place in sorted(placement.placements.items())
    ]
    try:
        write_ready_file(placing.config.ready_file, {"engines": engines})
    except OSError as error:
        _report(f"{placing.config.ready_file} cannot be written: {error.strerror}")


def _report_failure(error: Exception) -> int:
    _report(str(error))
    return 1


def _report(line: str) -> None:
    write_log_line(f"[ray] {line}")
