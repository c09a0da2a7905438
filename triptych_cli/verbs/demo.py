"""The verb `demo`: starts three processes, prints one answer and its trace, and stops everything."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych_cli.arguments import Serving, embedded_engine
from triptych_cli.config import ServeConfig
from triptych_cli.serve.loopback import ensure_loopback
from triptych_cli.serve.readiness import await_ready
from triptych_cli.serve.serve import limits_of, plan_stack
from triptych_cli.serve.sockets import socket_folder
from triptych_cli.serve.supervisor import StartTimeout, Supervisor
from triptych_cli.verbs.generation import Answer, Generation
from triptych_cli.verbs.trace import Trace, draw, read_traces
from triptych_kit.channel import open_channel
from triptych_kit.errors import ServiceError
from triptych_kit.process.child import ChildDied, Output
from triptych_kit.process.setup import stop_signals

DEFAULT_PROMPT = "Tell me a story about a fox and a lantern."
_MAX_TOKENS = 200
_TRACE_LIMIT_S = 3.0
_TRACE_RETRY_S = 0.05
_SPANS = ("tokenize", "queue", "prefill", "decode", "detokenize")


class DemoFailed(Exception):
    """The demo has failed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An answer with its client-side latencies."""

    answer: Answer
    first_token_ms: float
    tokens_per_s: float


def run_demo(prompt: str, environment: Mapping[str, str]) -> int:
    """Run the demo. Returns 0 with a last line that begins `OK:`, or 1 with one that begins `FAILED:`."""
    ensure_loopback()
    try:
        # It asks as a client and as an operator, on loopback.
        asyncio.run(_demo(prompt, {**environment, "TRIPTYCH_API_KEY": ""}))
    except (ChildDied, StartTimeout, ServiceError, DemoFailed) as error:
        print(f"FAILED: {error}")
        return 1
    except asyncio.CancelledError:
        print("FAILED: interrupted")
        return 1
    return 0


async def _demo(prompt: str, environment: Mapping[str, str]) -> None:
    started_at = time.monotonic()
    _end_on_signals()

    def report(line: str) -> None:
        print(f"  {time.monotonic() - started_at:5.1f} s  {line}", flush=True)

    print("starting coordinator, engine and frontend as three processes", flush=True)
    config = ServeConfig(port=0, http=False, startup_timeout_s=120.0, drain_deadline_s=5.0)
    # No other client has its address, so no drain time is needed.
    flags = {"engine": embedded_engine(), "frontend": ("--drain-lag-s=0",)}
    with socket_folder() as sockets:
        supervisor = Supervisor(
            plan_stack(Serving(config, flags=flags), sockets),
            environment,
            await_ready=await_ready,
            report=report,
            on_change=_nothing,
            limits=limits_of(config),
            output=Output.KEPT,
        )
        measured, trace = await _run(supervisor, prompt)
    still_running = [name for name, child in supervisor.children.items() if child.is_running]
    if still_running:
        raise DemoFailed(f"still running: {', '.join(still_running)}")
    print(
        f"OK: {len(supervisor.children)} processes, {len(measured.answer.first.token_ids)} tokens,"
        f" {len(trace['spans'])} spans of one trace;"
        f" everything stopped after {time.monotonic() - started_at:.1f} s"
    )


async def _run(supervisor: Supervisor, prompt: str) -> tuple[Measured, Trace]:
    """Start everything, ask once, and stop everything."""
    try:
        await supervisor.start()
        print(f"\n> {prompt}\n", flush=True)
        measured = await _ask(supervisor.address_of("frontend-0"), prompt)
        _print_statistics(measured, supervisor)
        trace = await _trace(supervisor, measured.answer.trace_id)
        print("\n" + "\n".join(draw(trace)) + "\n", flush=True)
        _check(measured.answer, trace, supervisor)
    finally:
        await supervisor.stop()
    return measured, trace


def _end_on_signals() -> None:
    """Make a signal end the demo like a failure, so that everything is stopped."""
    running = asyncio.current_task()
    if running is not None:
        for number in stop_signals():
            asyncio.get_running_loop().add_signal_handler(number, running.cancel)


async def _ask(address: str, prompt: str) -> Measured:
    request = generate_pb2.GenerateRequest(
        # One turn in the format that the embedded model was trained on.
        prompt=f"<|user|>{prompt.strip()}<|end|><|assistant|>",
        add_special_tokens=False,
        sampling=sampling_pb2.SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS),
    )
    asked_at = time.perf_counter()
    first_at = last_at = 0.0
    async with open_channel(address, profile="public") as channel:
        generation = Generation(channel, request)
        async for response in generation.events(timeout_s=60.0):
            if response.delta.token_ids:
                last_at = time.perf_counter()
                first_at = first_at or last_at
            print(response.delta.text, end="", flush=True)
    print("\n", flush=True)
    num_later = max(1, len(generation.answer.first.token_ids) - 1)
    tokens_per_s = num_later / (last_at - first_at) if last_at > first_at else 0.0
    return Measured(generation.answer, (first_at - asked_at) * 1000, tokens_per_s)


def _print_statistics(measured: Measured, supervisor: Supervisor) -> None:
    answer = measured.answer
    pids = ", ".join(f"{name} {child.pid}" for name, child in supervisor.children.items())
    print(f"time to first token  {measured.first_token_ms:.1f} ms")
    print(f"tokens/s             {measured.tokens_per_s:.0f}")
    print(f"tokens               {len(answer.first.token_ids)}, then {answer.first.finish_reason}")
    print(f"request id           {answer.request_id}")
    print(f"trace id             {answer.trace_id}")
    print(f"pids                 {pids}", flush=True)


async def _trace(supervisor: Supervisor, trace_id: str) -> Trace:
    """The request's trace; waits, as it is available only after the request's end."""
    announcement = supervisor.children["frontend-0"].announcement
    if announcement is None:
        raise DemoFailed("the frontend has not announced itself")
    deadline = time.monotonic() + _TRACE_LIMIT_S
    while time.monotonic() < deadline:
        for trace in await read_traces(announcement.admin_http, 10, timeout_s=_TRACE_LIMIT_S):
            if trace["trace_id"] == trace_id:
                return trace
        await asyncio.sleep(_TRACE_RETRY_S)
    raise DemoFailed("the request has no trace")


def _check(answer: Answer, trace: Trace, supervisor: Supervisor) -> None:
    pids = {child.pid for child in supervisor.children.values()} | {os.getpid()}
    if len(pids) != len(supervisor.children) + 1:
        raise DemoFailed("services share a process")
    if not answer.first.text.strip():
        raise DemoFailed("the answer is empty")
    if answer.usage.get("num_completion_tokens") != len(answer.first.token_ids):
        raise DemoFailed(f"usage is {answer.usage}, but {len(answer.first.token_ids)} tokens were received")
    missing = set(_SPANS) - {span["name"] for span in trace["spans"]}
    if missing:
        raise DemoFailed(f"the trace lacks {', '.join(sorted(missing))}")


def _nothing() -> None:
    """There is no ready file to update."""
