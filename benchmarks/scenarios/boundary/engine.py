"""An engine process without a model: the real servicer, or a bare stream, over a synthetic loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from triptych_kit.process.setup import prepare_process

prepare_process("engine")

import grpc.aio  # noqa: E402
import uvloop  # noqa: E402

from benchmarks.rig.lines import Line, answer_lines, send_line  # noqa: E402
from engine_svc.admin.lifecycle import Lifecycle  # noqa: E402
from engine_svc.admin.served_engine import LoadedCore, ServedEngine  # noqa: E402
from engine_svc.core.facts import EngineFacts, EngineIdentity, ModelFingerprint  # noqa: E402
from engine_svc.core.request import FirstOutput, Request  # noqa: E402
from engine_svc.core.sampling_params import SamplingParams  # noqa: E402
from engine_svc.loop.mailbox import Add, Call, Inbox, Outbox, StatsSnapshot  # noqa: E402
from engine_svc.loop.step_output import StepOutput  # noqa: E402
from engine_svc.process.run import calm_collector  # noqa: E402
from engine_svc.session.servicer import EngineCoreServicer  # noqa: E402
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, step_pb2  # noqa: E402
from triptych_kit.clock import MonotonicClock  # noqa: E402
from triptych_kit.interceptors import server_interceptors  # noqa: E402
from triptych_kit.limits import INTERNAL  # noqa: E402

_VOCABULARY_SIZE = 128_000
_MAX_MODEL_LEN = 1_000_000
# What is under way when the last step was published gets so long to leave the process.
_SETTLE_S = 0.02
# As in the engine's own process.
_SWITCH_INTERVAL_S = 0.0005
_TOKEN_IDS = [row * 7919 % _VOCABULARY_SIZE for row in range(4096)]


@dataclass(slots=True)
class _Steps:
    """Steps that were asked for."""

    num_left: int
    interval_s: float
    on_done: Callable[[], object]


class SyntheticLoop:
    """In place of the engine's thread, with rows of one session: a token a row a step, and no row ends.

    ADDs are answered at once, with one step of all rows.
    """

    def __init__(self) -> None:
        self.inbox = Inbox(8192)
        self._step_number = 0
        self._outbox: Outbox | None = None
        # Replaced and never changed: a step that is still unread may refer to it.
        self._handles: list[int] = []
        self._steps: _Steps | None = None

    def begin_steps(self, steps: _Steps) -> None:
        """Publish steps from now on. May be called from any thread; `on_done` is called in the loop's."""
        self.inbox.put(Call(lambda: setattr(self, "_steps", steps)))

    def run(self) -> None:
        due_at = time.monotonic()
        while True:
            self._read_inbox()
            steps = self._steps
            if steps is None:
                self.inbox.wait(None)
                due_at = time.monotonic()
            elif steps.num_left:
                steps.num_left -= 1
                self._publish([])
                if steps.interval_s:
                    due_at += steps.interval_s
                    time.sleep(max(0.0, due_at - time.monotonic()))
            else:
                time.sleep(_SETTLE_S)
                self._steps = None
                steps.on_done()

    def _read_inbox(self) -> None:
        before = len(self._handles)
        for command in self.inbox.take():
            match command:
                case Add(_, outbox, handle):
                    self._outbox = outbox
                    self._handles = [*self._handles, handle]
                case Call(work):
                    work()
        if len(self._handles) > before:
            self._publish([(row, FirstOutput(0)) for row in range(before, len(self._handles))])

    def _publish(self, first: list[tuple[int, FirstOutput]]) -> None:
        num_rows = len(self._handles)
        # Without rows, what is left is what keeping the pace costs by itself.
        if not num_rows or self._outbox is None:
            return
        self._step_number += 1
        tokens = _TOKEN_IDS[:num_rows]
        self._outbox.publish(StepOutput(self._step_number, self._handles, [1] * num_rows, tokens, [], first))


class _BareOutbox(Outbox):
    """Steps as messages, which are made once for all steps of the same rows."""

    def __init__(self, send: Callable[[engine_pb2.ConnectResponse], None]) -> None:
        super().__init__(max_bytes=0, wake=lambda: None)
        self._send, self._loop = send, asyncio.get_running_loop()
        self._handles: list[int] = []
        self._message = engine_pb2.ConnectResponse()

    def publish(self, output: StepOutput) -> None:
        if output.handles is not self._handles:
            self._handles = output.handles
            step = step_pb2.Step(
                step_number=output.step_number,
                handles=array("I", output.handles).tobytes(),
                num_tokens=bytes(output.num_tokens),
                token_ids=array("I", output.token_ids).tobytes(),
            )
            self._message = engine_pb2.ConnectResponse(step=step)
        self._loop.call_soon_threadsafe(self._send, self._message)


class BareServicer(engine_pb2_grpc.EngineCoreServiceServicer):
    """The stream's messages without a session: nothing is converted, numbered or kept."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    async def Connect(  # type: ignore[override]  # The stubs know the server with threads.
        self, request_iterator: AsyncIterator[engine_pb2.ConnectRequest], context: Any
    ) -> None:
        messages: asyncio.Queue[engine_pb2.ConnectResponse] = asyncio.Queue()
        outbox = _BareOutbox(messages.put_nowait)
        writer = asyncio.ensure_future(self._write(messages, context))
        try:
            async for message in request_iterator:
                for entry in message.add.entries:
                    sampling = SamplingParams(entry.sampling.max_tokens)
                    self._inbox.put(Add(Request(str(entry.handle), [1], 1, sampling), outbox, entry.handle))
        finally:
            writer.cancel()

    @staticmethod
    async def _write(messages: asyncio.Queue[engine_pb2.ConnectResponse], context: Any) -> None:
        while True:
            await context.write(await messages.get())


def _served_engine(inbox: Inbox) -> ServedEngine:
    fingerprint = ModelFingerprint(
        "ab" * 32, "float32", "cd" * 32, _VOCABULARY_SIZE, "", "synthetic", _MAX_MODEL_LEN
    )
    facts = EngineFacts(
        model_name="synthetic",
        fingerprint=fingerprint,
        max_model_len=_MAX_MODEL_LEN,
        block_size=16,
        num_kv_blocks=65_536,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        vocab_size=_VOCABULARY_SIZE,
        eos_token_ids=(2,),
    )
    served = ServedEngine(
        identity=EngineIdentity("engine-0", 1, "benchmark"),
        artifacts=(),
        lifecycle=Lifecycle(),
        inbox=inbox,
        stats_snapshot=StatsSnapshot(),
        clock=MonotonicClock(),
    )
    served.become_ready(LoadedCore(facts, refusal=lambda request: None, prepare=lambda request: None))
    return served


async def _serve(side: str) -> None:
    loop, event_loop = SyntheticLoop(), asyncio.get_running_loop()
    threading.Thread(target=loop.run, name="engine", daemon=True).start()
    interceptors = server_interceptors("engine", limits=INTERNAL.message_limits) if side == "ours" else ()
    server = grpc.aio.server(interceptors=interceptors, options=INTERNAL.options())
    beating = None
    if side == "ours":
        servicer = EngineCoreServicer(_served_engine(loop.inbox))
        servicer.add_to(server)
        beating = asyncio.ensure_future(servicer.beat_forever())
    else:
        engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(BareServicer(loop.inbox), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    calm_collector()
    send_line({"address": f"127.0.0.1:{port}"})

    async def answer(command: Line) -> Line:
        done: asyncio.Future[None] = event_loop.create_future()
        began_at_cpu_s = time.process_time()

        def on_done() -> None:
            event_loop.call_soon_threadsafe(done.set_result, None)

        loop.begin_steps(_Steps(command["num_steps"], command["interval_s"], on_done))
        await done
        return {"cpu_s": time.process_time() - began_at_cpu_s}

    await answer_lines(answer)
    del beating


if __name__ == "__main__":
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvloop.run(_serve(sys.argv[1]))
