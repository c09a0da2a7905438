"""An engine process without a model: the real servicer and sessions over a synthetic loop.

Started by `benchmarks.boundary`, which asks it by lines of JSON. The loop runs in a thread of this process or
in a process of its own behind a pair of sockets; the server is that of `grpc.aio` or the one with threads.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from benchmarks.boundary_control import Line, answer_lines, say
from service_kit.process import prepare_process

if TYPE_CHECKING:
    import grpc

    from engine_svc.admin.served_engine import ServedEngine
    from engine_svc.loop.mailbox import Inbox

MODEL_NAME = "synthetic"
MAX_MODEL_LEN = 1_000_000
VOCABULARY_SIZE = 128_000
# As in `engine_svc.process.run`.
_SWITCH_INTERVAL_S = 0.0005
_NUM_THREADS = 4


class _Loop(Protocol):
    @property
    def inbox(self) -> Inbox:
        """Where sessions leave what they want."""
        ...

    async def run_steps(self, num_steps: int, interval_s: float) -> float:
        """Publish steps; returns what they cost a process that is not this one, in seconds of CPU."""
        ...


class _LoopThread:
    """The production arrangement: the loop in a thread beside the event loop."""

    def __init__(self) -> None:
        from benchmarks.boundary_loop import SyntheticLoop
        from engine_svc.loop.mailbox import Inbox

        self.inbox = Inbox(8192)
        self._loop = SyntheticLoop(self.inbox)
        threading.Thread(target=self._loop.run, name="engine", daemon=True).start()

    async def run_steps(self, num_steps: int, interval_s: float) -> float:
        """Publish steps; the CPU is this process's."""
        event_loop = asyncio.get_running_loop()
        done = event_loop.create_future()
        self._loop.begin_steps(
            num_steps, interval_s, lambda _: event_loop.call_soon_threadsafe(done.set_result, None)
        )
        await done
        return 0.0


async def _serve(arguments: argparse.Namespace) -> None:
    from benchmarks.boundary_bare import start_bare
    from engine_svc.process.run import calm_collector

    if arguments.loop == "thread":
        loop: _Loop = _LoopThread()
    else:
        from benchmarks.boundary_bridge import LoopProcess

        loop = await LoopProcess.start()
    served = _served_engine(loop.inbox)
    listen = arguments.listen
    if arguments.server == "aio":
        port, kept = await _start_aio(served, listen)
    elif arguments.server == "sync":
        port, kept = _start_sync(served, listen)
    else:
        port, kept = await start_bare(loop.inbox, listen)
    calm_collector()
    say({"address": listen if listen.startswith("unix:") else f"127.0.0.1:{port}"})

    async def answer(command: Line) -> Line:
        began_at_cpu_s = time.process_time()
        elsewhere_s = await loop.run_steps(command["num_steps"], command["interval_s"])
        return {"cpu_s": time.process_time() - began_at_cpu_s + elsewhere_s}

    await answer_lines(answer)
    del kept


def _served_engine(inbox: Inbox) -> ServedEngine:
    from engine_svc.admin.lifecycle import Lifecycle
    from engine_svc.admin.served_engine import LoadedCore, ServedEngine
    from engine_svc.core.facts import EngineFacts, EngineIdentity, ModelFingerprint
    from engine_svc.loop.mailbox import Board
    from service_kit.clock import MonotonicClock

    fingerprint = ModelFingerprint(
        "ab" * 32, "float32", "cd" * 32, VOCABULARY_SIZE, "", MODEL_NAME, MAX_MODEL_LEN
    )
    facts = EngineFacts(
        model_name=MODEL_NAME,
        fingerprint=fingerprint,
        max_model_len=MAX_MODEL_LEN,
        block_size=16,
        num_kv_blocks=65_536,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        vocab_size=VOCABULARY_SIZE,
        eos_token_ids=(2,),
    )
    served = ServedEngine(
        identity=EngineIdentity("engine-0", 1, "benchmark"),
        artifacts=(),
        lifecycle=Lifecycle(),
        inbox=inbox,
        board=Board(),
        clock=MonotonicClock(),
    )
    served.become_ready(LoadedCore(facts, refusal=lambda request: None, prepare=lambda request: None))
    return served


async def _start_aio(served: ServedEngine, listen: str) -> tuple[int, object]:
    """As `service_kit.server` does, which knows no unix sockets."""
    import grpc.aio

    from engine_svc.session.servicer import EngineCoreServicer
    from service_kit.interceptors import server_interceptors
    from service_kit.limits import INTERNAL

    servicer = EngineCoreServicer(served)
    server = grpc.aio.server(
        interceptors=server_interceptors("engine", max_fields=INTERNAL.max_fields), options=INTERNAL.options()
    )
    servicer.add_to(server)
    port = server.add_insecure_port(listen)
    await server.start()
    return port, (server, asyncio.ensure_future(servicer.beat_forever()))


def _start_sync(served: ServedEngine, listen: str) -> tuple[int, grpc.Server]:
    import grpc

    from benchmarks.boundary_sync import SyncServicer
    from service_kit.limits import INTERNAL
    from triptych.engine.v1 import engine_pb2_grpc

    server = grpc.server(ThreadPoolExecutor(_NUM_THREADS), options=INTERNAL.options())
    engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(SyncServicer(served), server)
    port = server.add_insecure_port(listen)
    server.start()
    return port, server


def main() -> None:
    """Serve until the standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True, help="host:0, or unix:PATH")
    parser.add_argument("--server", choices=("aio", "sync", "bare"), required=True)
    parser.add_argument("--loop", choices=("thread", "child"), required=True)
    parser.add_argument("--experiments", choices=("ours", "default"), required=True)
    arguments = parser.parse_args()
    if arguments.experiments == "ours":
        prepare_process("engine")

    import uvloop

    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvloop.run(_serve(arguments))


if __name__ == "__main__":
    main()
