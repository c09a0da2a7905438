"""The TCP side of a played engine: what is taken is closed."""

from __future__ import annotations

import asyncio
import gc
import socket

from triptych_conformance.wire import Wire


async def _end_after(num_turns: int) -> None:
    target = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    host, port = target.sockets[0].getsockname()
    wire = Wire("127.0.0.1:0", f"{host}:{port}")
    address = await wire.start()
    with socket.create_connection((host, int(address.rpartition(":")[2]))):
        for _ in range(num_turns):
            await asyncio.sleep(0)
        await wire.stop()
    target.close()


def test_the_end_closes_a_connection_that_is_just_taken() -> None:
    for num_turns in range(7):
        asyncio.run(_end_after(num_turns))
    # What was not closed warns now, which is an error.
    gc.collect()
