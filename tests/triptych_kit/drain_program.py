"""A service for drain tests: streams one message at once and another when stdin gets a line.

Announces its address and serves until its streams are done after SIGTERM. A third argument says what it does
about a drain that is cut: it "ends" the streams by an error that names the cause, or "hangs" for ever.
Run as a program, never imported.
"""

from __future__ import annotations

from triptych_kit.process.setup import prepare_process

prepare_process("coordinator")

import asyncio  # noqa: E402
import sys  # noqa: E402
from collections.abc import AsyncIterator  # noqa: E402
from typing import Any  # noqa: E402

import uvloop  # noqa: E402

from tests.triptych_kit.fakes import SERVICE_NAME, FakeService  # noqa: E402
from triptych_kit.errors import Unavailable  # noqa: E402
from triptych_kit.limits import PUBLIC  # noqa: E402
from triptych_kit.server import DrainCut, Server, run_server, write_announcement  # noqa: E402
from triptych_kit.telemetry.traces import setup_telemetry, shutdown_telemetry  # noqa: E402


async def serve(fd: int) -> int:
    loop = asyncio.get_running_loop()
    go_on, idle = asyncio.Event(), asyncio.Event()
    manner = sys.argv[3] if len(sys.argv) > 3 else ""
    causes: list[DrainCut] = []
    idle.set()

    def on_line() -> None:
        sys.stdin.readline()
        go_on.set()

    loop.add_reader(sys.stdin, on_line)

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        idle.clear()
        yield b"first"
        await go_on.wait()
        if causes:
            raise Unavailable(f"moved on, because of the {causes[0].value}", reason="MOVED")
        yield b"last"
        idle.set()

    async def drained() -> None:
        await idle.wait()

    async def cut(cause: DrainCut) -> None:
        if manner == "hangs":
            await asyncio.Event().wait()
        causes.append(cause)
        go_on.set()

    server = Server(
        listen="127.0.0.1:0",
        registrations=[FakeService(stream=stream).register()],
        profile=PUBLIC,
        service="fake",
    )

    def announce(addresses: list[str]) -> None:
        server.set_ready(SERVICE_NAME, True)
        write_announcement(fd, {"service": "fake", "index": 0, "address": addresses[0]})

    return await run_server(
        [server],
        on_drain=drained,
        drain_deadline_s=float(sys.argv[2]),
        announce=announce,
        on_cut=cut if manner else None,
    )


if __name__ == "__main__":
    setup_telemetry("fake", instance="0", log_format="json")
    code = uvloop.run(serve(int(sys.argv[1])))
    shutdown_telemetry()
    sys.exit(code)
