"""A frontend without engines: it sends scripted answers over real gRPC, and records its requests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.rig.processes import LOOPBACK
from tests.processes import START_LIMIT_S, running_async
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2
from triptych_kit.addresses import join_address
from triptych_kit.errors import InvalidArgument
from triptych_kit.server import PUBLIC, Registration, Server

_NAME = "triptych.api.v1.InferenceService"


class FakeFrontend(inference_pb2_grpc.InferenceServiceServicer):
    """Answers every prompt with "hello world" as ids 5 and 6, or refuses what is too hot.

    Of several outputs each ends with its index.
    """

    def __init__(self, text: str, *, hangs: bool) -> None:
        self.cancelled = asyncio.Event()
        self._text = text
        self._hangs = hangs
        self.requests: list[generate_pb2.GenerateRequest] = []
        self.metadata: list[dict[str, str]] = []

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if request.sampling.temperature > 2:
            message = "sampling.temperature is 3, the range is 0..2"
            raise InvalidArgument(message, field="sampling.temperature")
        prompt_ids = list(request.token_ids.ids) or [1, 2]
        is_complete = False
        try:
            yield generate_pb2.GenerateResponse(
                position=1,
                started=generate_pb2.Started(
                    request_id=request.request_id or "made-here",
                    num_prompt_tokens=len(prompt_ids),
                    prompt_token_ids=prompt_ids if request.return_prompt_token_ids else [],
                ),
            )
            # The last output first: they may come in any order.
            for index in reversed(range(max(1, request.sampling.n))):
                last = f"{self._text} {index}" if request.sampling.n > 1 else self._text
                for text, token_id in (("hello", 5), (last, 6)):
                    delta = generate_pb2.Delta(output_index=index, text=text, token_ids=[token_id])
                    yield generate_pb2.GenerateResponse(delta=delta)
                    if self._hangs:
                        await asyncio.Event().wait()
                usage = output_pb2.Usage(num_prompt_tokens=len(prompt_ids), num_completion_tokens=2)
                finished = generate_pb2.Finished(
                    output_index=index, reason=output_pb2.FINISH_REASON_STOP, usage=usage
                )
                yield generate_pb2.GenerateResponse(finished=finished)
            is_complete = True
        finally:
            # Wherever the call was when its client went: a message may still be on its way out.
            if not is_complete:
                self.cancelled.set()


@dataclass(frozen=True, slots=True)
class Served:
    """A fake frontend and where it listens."""

    frontend: FakeFrontend
    server: Server
    url: str


@asynccontextmanager
async def fake_frontend(text: str = " world", *, hangs: bool = False) -> AsyncIterator[Served]:
    """A fake frontend that runs for the length of a test; one that hangs never gets past "hello"."""
    frontend = FakeFrontend(text, hangs=hangs)
    add = partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, frontend)
    server = Server(
        listen=join_address(LOOPBACK, 0),
        registrations=[Registration(_NAME, add, is_ready=True)],
        profile=PUBLIC,
        service="frontend",
    )
    address = await server.start()
    try:
        yield Served(frontend, server, f"grpc://{address}")
    finally:
        await server.stop(0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of the command line came to."""

    pid: int
    exit_code: int
    out: str
    err: str


async def triptych(
    *arguments: str,
    stdin: str = "",
    environment: Mapping[str, str] | None = None,
    interrupt_after: bytes | None = None,
    interrupt_when: asyncio.Event | None = None,
) -> Outcome:
    """Run the `triptych` command in a process of its own; interrupt it once it printed or did something."""
    async with running_async(
        *(sys.executable, "-m", "triptych_cli.cli", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
    ) as process:
        if interrupt_after is not None and process.stdout is not None:
            await asyncio.wait_for(process.stdout.readuntil(interrupt_after), START_LIMIT_S)
            process.send_signal(signal.SIGINT)
        if interrupt_when is not None:
            await asyncio.wait_for(interrupt_when.wait(), START_LIMIT_S)
            process.send_signal(signal.SIGINT)
        out, err = await asyncio.wait_for(process.communicate(stdin.encode()), 300)
        return Outcome(process.pid, process.returncode or 0, out.decode(), err.decode())


def children_of(pid: int, service: str) -> list[int]:
    """The processes of a service, or of any, that the launcher, or the frontend, of that id has started."""
    # Before and after it has given itself a title.
    entry = f"triptych_kit.process.setup\0{pid}\0{service}"
    markers = [marker.encode() for marker in (entry, f"triptych-{service}")]
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (folder / "cmdline").read_bytes()
            if parent_of(folder) == pid and any(marker in command for marker in markers):
                found.append(int(folder.name))
    return found


def parent_of(folder: Path) -> int:
    """The parent of the process that a folder of /proc is about."""
    return int((folder / "stat").read_text().rpartition(")")[2].split()[1])
