"""What a decode step costs in which no row changes, counted in bytecodes, calls and bytes: so much per row.

A clock would measure the machine as well. What runs is the loop with scheduler, cache, input batch and
outbox; only the model is missing.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Add, Inbox, Outbox, StatsSnapshot
from engine_svc.loop.protocols import NoLockstep
from engine_svc.runner.input_batch import InputBatch
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.runner.fakes import apply
from triptych_kit.clock import FakeClock

BLOCK_SIZE = 16
# The block that was begun last has room for all steps here. Python keeps integers up to 256 for ever:
# positions are greater in both, so that they take as much memory.
SHORT, LONG = 20 * BLOCK_SIZE + 2, 60 * BLOCK_SIZE + 2
MAX_MODEL_LEN = LONG + 64
NUM_ROWS = (64, 256, 1024)
TOKEN = 7

# Upper limits of what one more row costs. When these were set it cost 312 and 359 bytecodes, and 224 bytes.
MAX_BYTECODES = {1: 340, 2: 390}  # by steps in flight
MAX_BYTES = 250

_TREE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Work:
    """What one step did, without what this file did for it."""

    bytecodes: int
    calls: Counter[str]  # of Python functions, by file and name
    library_calls: Counter[str]  # of functions in C, by the file that calls
    num_bytes: int  # the most that was allocated at once


@dataclass(frozen=True)
class Pending:
    """A step that is done."""

    step_result: StepResult

    def result(self) -> StepResult:
        return self.step_result


class Decoding:
    """An engine in which `num_rows` requests decode and no other can be admitted."""

    def __init__(
        self, num_rows: int, num_tokens: int, depth: int, num_waiting: int, num_blocked: int
    ) -> None:
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=num_rows * num_tokens,
            max_num_seqs=num_rows,
            async_scheduling=depth > 1,
            max_steps_in_flight=depth,
        )
        num_blocks = 1 + num_rows * (num_tokens // BLOCK_SIZE + 1)
        self._scheduler = build_core(config, CacheConfig(num_blocks, (FullAttention(BLOCK_SIZE),))).scheduler
        self._batch = InputBatch(max_num_seqs=num_rows, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
        self._outbox = Outbox(max_bytes=1 << 30, wake=lambda: None)
        inbox = Inbox(max_commands=10_000)
        self._engine = Engine(
            scheduler=self._scheduler,
            executor=self,
            inbox=inbox,
            stats_snapshot=StatsSnapshot(),
            clock=FakeClock(),
            lockstep=NoLockstep(),
            max_in_flight=depth,
        )
        for index in range(num_rows + num_waiting + num_blocked):
            request = Request(
                str(index),
                [TOKEN] * num_tokens,
                num_tokens,
                SamplingParams(max_tokens=60),
                cache_salt=str(index),
                blockers={"grammar"} if index >= num_rows + num_waiting else set(),
            )
            assert inbox.put(Add(request, self._outbox, index))
        for _ in range(3):
            self.step()
        stats = self._scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_blocked) == (
            num_rows,
            num_waiting,
            num_blocked,
        )

    def step(self) -> None:
        """One turn of the loop; the outputs of the one before were read."""
        while self._outbox.take() is not None:
            continue
        assert self._engine.turn()

    def launch(self, plan: StepPlan) -> Pending:
        apply(self._batch, plan)
        inputs = self._batch.gather(plan)
        rows = inputs.sampling_rows
        self._batch.append(rows, inputs.sampling_positions, torch.full((len(rows),), TOKEN))
        return Pending(StepResult(plan.step_number, [[TOKEN]] * len(rows)))

    def drop(self) -> None:
        raise AssertionError("no step fails here")

    def shutdown(self) -> None:
        """Nothing to shut down."""


@cache
def work(num_rows: int, num_tokens: int, depth: int, num_waiting: int = 0, num_blocked: int = 0) -> Work:
    """The work of one decode step, each count from a step of its own."""
    decoding = Decoding(num_rows, num_tokens, depth, num_waiting, num_blocked)
    bytecodes: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    library_calls: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            bytecodes[frame.f_code.co_filename] += 1
        return trace

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call":
            calls[f"{file.removeprefix(f'{_TREE}/')}:{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            library_calls[file.removeprefix(f"{_TREE}/")] += 1

    # A collection in between would count the callbacks of test tools.
    gc.disable()
    sys.settrace(trace)
    try:
        decoding.step()
    finally:
        sys.settrace(None)
        gc.enable()
    sys.setprofile(profile)
    try:
        decoding.step()
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        decoding.step()
        num_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del bytecodes[__file__]
    return Work(bytecodes.total(), calls, library_calls, num_bytes)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_work_grows_with_the_rows_and_a_row_costs_little(depth: int):
    few, some, many = (work(num_rows, SHORT, depth) for num_rows in NUM_ROWS)
    per_row = (some.bytecodes - few.bytecodes) / (NUM_ROWS[1] - NUM_ROWS[0])
    assert per_row <= MAX_BYTECODES[depth]
    # Another library of the process may run a callback in one of the steps.
    per_further_row = (many.bytecodes - some.bytecodes) / (NUM_ROWS[2] - NUM_ROWS[1])
    assert per_further_row == pytest.approx(per_row, abs=0.5)
    assert (many.num_bytes - some.num_bytes) / (NUM_ROWS[2] - NUM_ROWS[1]) <= MAX_BYTES
    # What is paid once for a step is less than what 20 rows cost.
    assert few.bytecodes - NUM_ROWS[0] * per_row < 20 * per_row


@pytest.mark.parametrize(
    ("depth", "functions"),
    [
        (1, {"engine_svc/scheduler/plan_builder.py:add_row", "<string>:__init__"}),
        (
            2,
            {
                "engine_svc/scheduler/plan_builder.py:add_row",
                "engine_svc/scheduler/scheduler.py:_settle",
                "<string>:__init__",  # of RequestOutput
            },
        ),
    ],
)
def test_of_all_functions_only_these_are_called_for_each_row(depth: int, functions: set[str]):
    """So no feature that the rows do not use, no policy and not the cache is asked about them."""
    few, many = work(NUM_ROWS[0], SHORT, depth), work(NUM_ROWS[2], SHORT, depth)
    more = {name: count - few.calls[name] for name, count in many.calls.items() if count != few.calls[name]}
    assert more == dict.fromkeys(functions, NUM_ROWS[2] - NUM_ROWS[0])


@pytest.mark.parametrize("depth", [1, 2])
def test_the_inputs_of_all_rows_are_made_by_the_same_few_array_operations(depth: int):
    file = "engine_svc/runner/input_batch.py"
    few, many = work(NUM_ROWS[0], SHORT, depth), work(NUM_ROWS[2], SHORT, depth)
    assert few.library_calls[file] == many.library_calls[file] <= 20


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_long_context_costs_nothing_more(num_rows: int, depth: int):
    """Neither tokens nor block tables of a row are copied or read anew."""
    short, long = work(num_rows, SHORT, depth), work(num_rows, LONG, depth)
    assert (short.bytecodes, short.calls, short.library_calls) == (
        long.bytecodes,
        long.calls,
        long.library_calls,
    )
    assert abs(short.num_bytes - long.num_bytes) < 1024


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_wait_or_are_blocked_cost_nothing(depth: int):
    alone = work(NUM_ROWS[1], SHORT, depth)
    crowded = work(NUM_ROWS[1], SHORT, depth, num_waiting=300, num_blocked=300)
    assert (alone.bytecodes, alone.calls, alone.library_calls) == (
        crowded.bytecodes,
        crowded.calls,
        crowded.library_calls,
    )
    assert abs(alone.num_bytes - crowded.num_bytes) < 1024
