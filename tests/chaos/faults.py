"""Faults of scenarios, each with the proof that it struck; those of single processes are benchmarks' own."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path

import psutil

from benchmarks.rig.faults import FaultMissed
from benchmarks.rig.processes import ServiceProcess
from tests.chaos.fault_plugin import EngineFault, strikes
from tests.chaos.proxy import Direction, TcpProxy

_STRIKE_LIMIT_S = 60.0
_RECONNECT_LIMIT_S = 60.0
_POLL_S = 0.005


async def cut(proxy: TcpProxy) -> int:
    """RST to both ends of every connection; shown by connections that were cut and one that came back."""
    num_accepted = proxy.num_accepted
    num_cut = proxy.cut()
    if not num_cut:
        raise FaultMissed("no connection went through the proxy")
    try:
        async with asyncio.timeout(_RECONNECT_LIMIT_S):
            while proxy.num_accepted == num_accepted:  # noqa: ASYNC110  The proxy only counts.
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise FaultMissed(f"{num_cut} connections were cut and none came back") from None
    return num_cut


async def partition(proxy: TcpProxy, meanwhile: Awaitable[None], *directions: Direction) -> int:
    """Let nothing pass for as long as that takes; shown by bytes that were held back, each way. How many."""
    before = dict(proxy.num_held_bytes)
    proxy.hold(*directions)
    try:
        await meanwhile
    finally:
        held = {direction: proxy.num_held_bytes[direction] - before[direction] for direction in directions}
        proxy.release()
    if not all(held.values()):
        raise FaultMissed(f"nothing wanted to pass: {held}")
    return sum(held.values())


async def struck(folder: Path, fault: EngineFault, *, limit_s: float = _STRIKE_LIMIT_S) -> int:
    """Wait until an engine's plugin has noted that it struck; how often."""
    try:
        async with asyncio.timeout(limit_s):
            while not (count := strikes(folder, fault)):  # noqa: ASYNC110  A file is all there is.
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise FaultMissed(f"{fault.name} never struck: no line in {folder}") from None
    return count


async def kill_rank(engine: ServiceProcess) -> int:
    """kill -9 one of the processes that share an engine's model; shown by its end. Its process id."""
    if not engine.is_running:
        raise FaultMissed(f"{engine.name} does not run")
    ranks = [child for child in psutil.Process(engine.pid).children() if _is_rank(child)]
    if len(ranks) < 2:
        raise FaultMissed(f"{engine.name} has {len(ranks)} ranks")
    rank = ranks[-1]
    os.kill(rank.pid, signal.SIGKILL)
    try:
        async with asyncio.timeout(_STRIKE_LIMIT_S):
            while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
    except psutil.NoSuchProcess:
        pass
    except TimeoutError:
        raise FaultMissed(f"rank {rank.pid} did not end") from None
    return rank.pid


def _is_rank(process: psutil.Process) -> bool:
    words = " ".join(process.cmdline())
    return "rank" in words
