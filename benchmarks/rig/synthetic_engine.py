"""An engine without a model: a process that speaks the real stream, with a token a request a step.

Steps come at a set rate, or as fast as its frontend takes them. It offers the embedded model's tokenizer and
chat template, and ids that vary.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import random
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.rig.lines import send_line
from benchmarks.rig.processes import LOOPBACK
from triptych_cli.services import embedded_model
from triptych_kit.addresses import join_address
from triptych_kit.process.setup import prepare_process

prepare_process("engine")

import grpc.aio  # noqa: E402  Its import reads what the line above has set.

from triptych.common.v1 import output_pb2  # noqa: E402
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2  # noqa: E402

MODEL_NAME = "synthetic"
MAX_MODEL_LEN = 1_000_000
VOCAB_SIZE = 2048
# Below are special tokens and single bytes, of which most begin a character and so show no text.
FIRST_PLAIN_ID = 300
_EOS_ID = 0
_HEARTBEAT_S = 0.2
_MAX_UNSENT_STEPS = 2
_POOL_SIZE = 1 << 16
_FILES = {
    session_pb2.ARTIFACT_KIND_TOKENIZER: "tokenizer.json",
    session_pb2.ARTIFACT_KIND_TOKENIZER_CONFIG: "tokenizer_config.json",
    session_pb2.ARTIFACT_KIND_CHAT_TEMPLATE: "chat_template.jinja",
    session_pb2.ARTIFACT_KIND_GENERATION_CONFIG: "generation_config.json",
    session_pb2.ARTIFACT_KIND_CONFIG: "config.json",
}


@dataclass(slots=True)
class _Row:
    num_left: int
    num_logprobs: int | None
    is_new: bool = True


class _Session:
    """One frontend's stream: its rows, and steps over all of them."""

    def __init__(self, rate: float, ids: array[int]) -> None:
        self._rate = rate
        self._ids = ids
        self._rng = random.Random(5)
        self._rows: dict[int, _Row] = {}
        self._has_rows = asyncio.Event()
        self._outgoing: asyncio.Queue[dict[str, object] | None] = asyncio.Queue(_MAX_UNSENT_STEPS)

    def add(self, entry: add_pb2.AddEntry) -> None:
        sampling = entry.sampling
        k = sampling.logprobs if sampling.HasField("logprobs") else None
        self._rows[entry.handle] = _Row(max(1, sampling.max_tokens), k)
        self._has_rows.set()

    def abort(self, handle: int) -> None:
        self._rows.pop(handle, None)

    async def messages(self, ready: session_pb2.Ready) -> AsyncGenerator[engine_pb2.ConnectResponse, None]:
        yield engine_pb2.ConnectResponse(seq=1, ready=ready)
        seq = 1
        while (content := await self._outgoing.get()) is not None:
            seq += 1
            yield engine_pb2.ConnectResponse(seq=seq, **content)

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT_S)
            beat = session_pb2.Heartbeat(state=session_pb2.ENGINE_STATE_READY)
            await self._outgoing.put({"heartbeat": beat})

    async def run_steps(self) -> None:
        step_number, due_at = 0, time.monotonic()
        while True:
            if not self._rows:
                self._has_rows.clear()
                await self._has_rows.wait()
                due_at = time.monotonic()
            step_number += 1
            await self._outgoing.put({"step": self._step(step_number)})
            if self._rate:
                due_at += 1 / self._rate
                await asyncio.sleep(max(0.0, due_at - time.monotonic()))

    async def end(self) -> None:
        await self._outgoing.put(None)

    def _step(self, step_number: int) -> step_pb2.Step:
        num_rows = len(self._rows)
        start = self._rng.randrange(len(self._ids) - num_rows)
        step = step_pb2.Step(
            step_number=step_number,
            handles=array("I", self._rows).tobytes(),
            num_tokens=b"\1" * num_rows,
            token_ids=self._ids[start : start + num_rows].tobytes(),
        )
        self._add_logprobs(step)
        for index, row in enumerate(self._rows.values()):
            row.num_left -= 1
            if row.is_new:
                row.is_new = False
                step.first.add(row=index, num_cached_tokens=0)
            if not row.num_left:
                step.finished.add(row=index, reason=output_pb2.FINISH_REASON_LENGTH)
        if step.finished:
            self._rows = {handle: row for handle, row in self._rows.items() if row.num_left}
        return step

    def _add_logprobs(self, step: step_pb2.Step) -> None:
        wanted = [row.num_logprobs for row in self._rows.values()]
        k = max((each for each in wanted if each is not None), default=None)
        if k is None:
            return
        nothing = math.nan
        step.sampled_logprobs = array("f", [nothing if each is None else -1.0 for each in wanted]).tobytes()
        step.sampled_ranks = array("I", [int(each is not None) for each in wanted]).tobytes()
        if k:
            start = self._rng.randrange(len(self._ids) - k * len(wanted))
            top = [
                nothing if each is None or place >= each else -1.0 - place
                for each in wanted
                for place in range(k)
            ]
            step.top_logprobs.k = k
            step.top_logprobs.token_ids = self._ids[start : start + k * len(wanted)].tobytes()
            step.top_logprobs.logprobs = array("f", top).tobytes()


class SyntheticEngine(engine_pb2_grpc.EngineCoreServiceServicer):
    """Takes any number of frontends; each gets its own steps."""

    def __init__(self, rate: float, folder: Path) -> None:
        self._rate = rate
        rng = random.Random(4)
        self._ids = array("I", rng.choices(range(FIRST_PLAIN_ID, VOCAB_SIZE), k=_POOL_SIZE))
        self._files = {kind: (folder / name).read_bytes() for kind, name in _FILES.items()}

    async def Connect(
        self, request_iterator: AsyncIterator[engine_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[engine_pb2.ConnectResponse, None]:
        """Hello, hello_ack, ready, then steps for what was added."""
        await anext(aiter(request_iterator))
        session = _Session(self._rate, self._ids)
        tasks = [
            asyncio.ensure_future(work)
            for work in (_read(session, request_iterator), session.beat(), session.run_steps())
        ]
        ack = session_pb2.HelloAck(
            engine_id="engine-0",
            engine_epoch=1,
            dp_size=1,
            state=session_pb2.ENGINE_STATE_READY,
            ack_interval_messages=64,
            schema_revision=1,
        )
        yield engine_pb2.ConnectResponse(hello_ack=ack)
        try:
            async for message in session.messages(self._ready()):
                yield message
        finally:
            for task in tasks:
                task.cancel()

    async def GetArtifacts(
        self, request: engine_pb2.GetArtifactsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[engine_pb2.GetArtifactsResponse, None]:
        for artifact in self._artifacts():
            if artifact.kind in request.kinds:
                content = self._files[artifact.kind]
                yield engine_pb2.GetArtifactsResponse(artifact=artifact, offset=0, chunk=content)

    def _ready(self) -> session_pb2.Ready:
        return session_pb2.Ready(
            model_name=MODEL_NAME,
            fingerprint=session_pb2.Fingerprint(digest=MODEL_NAME),
            artifacts=self._artifacts(),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[_EOS_ID],
            supported_tasks=["generate"],
        )

    def _artifacts(self) -> list[session_pb2.Artifact]:
        return [
            session_pb2.Artifact(
                kind=kind, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content)
            )
            for kind, content in self._files.items()
        ]


async def _read(session: _Session, messages: AsyncIterator[engine_pb2.ConnectRequest]) -> None:
    async for message in messages:
        for entry in message.add.entries:
            session.add(entry)
        for handle in message.abort.handles:
            session.abort(handle)
    await session.end()


async def _serve(rate: float) -> None:
    server = grpc.aio.server()
    engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(SyntheticEngine(rate, embedded_model()), server)
    port = server.add_insecure_port(join_address(LOOPBACK, 0))
    await server.start()
    send_line({"address": join_address(LOOPBACK, port)})
    await server.wait_for_termination()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=20.0, help="steps a second; 0 is as many as are taken")
    asyncio.run(_serve(parser.parse_args().rate))


if __name__ == "__main__":
    main()
