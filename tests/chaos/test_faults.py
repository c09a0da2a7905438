"""An injector without a target is an error: a test whose fault never struck has shown nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.rig import faults as process_faults
from benchmarks.rig.faults import FaultMissed
from benchmarks.rig.processes import LOOPBACK, Fleet, ServicePlan, ServiceProcess
from tests.chaos import faults
from tests.chaos.proxy import Direction, TcpProxy
from triptych_kit.addresses import join_address, split_address

pytestmark = pytest.mark.chaos


@pytest.fixture
async def ended(tmp_path: Path):
    async with Fleet(tmp_path) as fleet:
        process = fleet.add(ServicePlan("coordinator", 0))
        await fleet.start()
        await process.stop()
        yield process


@pytest.mark.parametrize("strike", [process_faults.kill, process_faults.stop, process_faults.terminate])
async def test_a_signal_to_no_process_is_an_error(strike, ended: ServiceProcess) -> None:
    with pytest.raises(FaultMissed):
        await strike(ended)


async def test_a_cut_without_connections_is_an_error() -> None:
    async with TcpProxy(join_address(LOOPBACK, 1)) as proxy:
        with pytest.raises(FaultMissed):
            await faults.cut(proxy)


async def test_a_partition_without_traffic_is_an_error() -> None:
    async with TcpProxy(join_address(LOOPBACK, 1)) as proxy:
        with pytest.raises(FaultMissed):
            await faults.partition(proxy, asyncio.sleep(0.01), Direction.IN)


async def test_what_is_held_passes_later_and_a_cut_is_a_reset() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, LOOPBACK, 0)
    port = server.sockets[0].getsockname()[1]
    async with server, TcpProxy(join_address(LOOPBACK, port)) as proxy:
        host, proxy_port = split_address(proxy.address)
        reader, writer = await asyncio.open_connection(host, proxy_port)
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        proxy.hold(Direction.OUT)
        writer.write(b"two")
        held = asyncio.ensure_future(reader.readexactly(3))
        async with asyncio.timeout(60.0):
            while not proxy.num_held_bytes[Direction.OUT]:  # noqa: ASYNC110  The proxy only counts.
                await asyncio.sleep(0.001)
        assert not held.done()
        proxy.release()
        assert await held == b"two"
        assert proxy.num_bytes == {Direction.IN: 6, Direction.OUT: 6}
        assert proxy.cut() == 1
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        writer.transport.abort()
