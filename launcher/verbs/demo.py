"""The verb `demo`: starts three processes, prints one answer and its trace, and stops everything."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.arguments import Serving, embedded_engine
from launcher.config import ServeConfig
from launcher.serve.loopback import ensure_loopback
from launcher.serve.readiness import await_ready
from launcher.serve.serve import limits_of, plan_stack
from launcher.serve.supervisor import StartTimeout, Supervisor
from launcher.verbs.generation import Answer, Generation
from service_kit.channel import open_channel
from service_kit.child import ChildDied, Output
from service_kit.errors import ServiceError, rpc_errors_translated
from service_kit.process import stop_signals
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import sampling_pb2

DEFAULT_PROMPT = "Tell me a story about a fox and a lantern."
_MAX_TOKENS = 200
_SPANS_LIMIT_S = 3.0
_SPANS_RETRY_S = 0.05
_TRACED = ("frontend-0", "engine-0")
_WIDTH = 44
_BLOCK = "█"
# Shorter than one column.
_SLIVER = "▏"


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
        asyncio.run(_demo(prompt, environment))
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
    config = ServeConfig(port=0, startup_timeout_s=120.0, drain_deadline_s=5.0)
    # No other client has its address, so no drain time is needed.
    flags = {"engine": embedded_engine(), "frontend": ("--drain-lag-s=0",)}
    supervisor = Supervisor(
        plan_stack(Serving(config, flags=flags)),
        environment,
        await_ready=await_ready,
        report=report,
        on_change=_nothing,
        limits=limits_of(config),
        output=Output.KEPT,
    )
    try:
        await supervisor.start()
        print(f"\n> {prompt}\n", flush=True)
        measured = await _ask(supervisor.address_of("frontend-0"), prompt)
        _print_statistics(measured, supervisor)
        spans = await _spans(supervisor, measured.answer.trace_id)
        print("\n" + "\n".join(draw(spans)) + "\n", flush=True)
        _check(measured.answer, spans, supervisor)
    finally:
        await supervisor.stop()
    still_running = [name for name, child in supervisor.children.items() if child.is_running]
    if still_running:
        raise DemoFailed(f"still running: {', '.join(still_running)}")
    print(
        f"OK: {len(supervisor.children)} processes, {len(measured.answer.first.token_ids)} tokens,"
        f" {len(spans)} spans of one trace from {len({span.pid for span in spans})} processes;"
        f" everything stopped after {time.monotonic() - started_at:.1f} s"
    )


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


async def _spans(supervisor: Supervisor, trace_id: str) -> list[admin_pb2.Span]:
    """The request's spans from both processes; waits, as a span is available only after its end."""
    deadline = time.monotonic() + _SPANS_LIMIT_S
    while True:
        found = [await _spans_of(supervisor, name, trace_id) for name in _TRACED]
        if all(found) or time.monotonic() > deadline:
            return [span for spans in found for span in spans]
        await asyncio.sleep(_SPANS_RETRY_S)


async def _spans_of(supervisor: Supervisor, name: str, trace_id: str) -> list[admin_pb2.Span]:
    announcement = supervisor.children[name].announcement
    if announcement is None:
        return []
    async with open_channel(announcement.admin_address) as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        with rpc_errors_translated():
            answer = await stub.GetTrace(admin_pb2.GetTraceRequest(trace_id=trace_id), timeout=5)
    return list(answer.spans)


def _check(answer: Answer, spans: list[admin_pb2.Span], supervisor: Supervisor) -> None:
    pids = {child.pid for child in supervisor.children.values()} | {os.getpid()}
    if len(pids) != len(supervisor.children) + 1:
        raise DemoFailed("services share a process")
    if not answer.first.text.strip():
        raise DemoFailed("the answer is empty")
    if answer.usage.get("num_completion_tokens") != len(answer.first.token_ids):
        raise DemoFailed(f"usage is {answer.usage}, but {len(answer.first.token_ids)} tokens were received")
    if len({span.pid for span in spans}) < len(_TRACED):
        raise DemoFailed("the trace does not have spans of frontend and engine")
    if {span.trace_id for span in spans} != {answer.trace_id}:
        raise DemoFailed("the spans are not of the request's trace")


def _nothing() -> None:
    """There is no ready file to update."""


def draw(spans: Iterable[admin_pb2.Span]) -> list[str]:
    """A line for each span: service, name, position on a time axis, duration; children below parents."""
    ordered = _by_parent(list(spans))
    if not ordered:
        return []
    start_ns = min(span.start_unix_ns for _, span in ordered)
    length_ns = max(1, max(span.end_unix_ns for _, span in ordered) - start_ns)
    names = [f"{'  ' * depth}{span.name}" for depth, span in ordered]
    name_width = max(len(name) for name in names)
    lines = []
    for name, (_, span) in zip(names, ordered, strict=True):
        left = min(_WIDTH - 1, (span.start_unix_ns - start_ns) * _WIDTH // length_ns)
        duration_ns = span.end_unix_ns - span.start_unix_ns
        bar = _BLOCK * (duration_ns * _WIDTH // length_ns) or _SLIVER
        where = f"{' ' * left}{bar}".ljust(_WIDTH)[:_WIDTH]
        label = f"{span.service:<9} {span.pid:>7}  {name:<{name_width}}"
        lines.append(f"{label}  {where} {duration_ns / 1e6:8.1f} ms{'' if span.ok else '  failed'}")
    return lines


def _by_parent(spans: list[admin_pb2.Span]) -> list[tuple[int, admin_pb2.Span]]:
    """Depth first, siblings in order of their start. A span whose parent is missing is a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[admin_pb2.Span]] = {}
    for span in sorted(spans, key=lambda one: one.start_unix_ns):
        parent = span.parent_span_id if span.parent_span_id in known else ""
        children.setdefault(parent, []).append(span)
    ordered: list[tuple[int, admin_pb2.Span]] = []
    waiting = [(0, span) for span in reversed(children.get("", []))]
    while waiting:
        depth, span = waiting.pop()
        ordered.append((depth, span))
        waiting += [(depth + 1, child) for child in reversed(children.get(span.span_id, []))]
    return ordered
