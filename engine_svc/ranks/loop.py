"""What a rank does: reads messages, runs the plans among them, tells what was sampled if that is its part.

Knows no processes and no model.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

from engine_svc.core.step import StepPlan, StepResult
from engine_svc.ranks.plan_channel import ChannelReader, ChannelWriter
from engine_svc.ranks.plan_codec import CALL, PLAN, STOP, PlanDecoder
from engine_svc.ranks.result_codec import decode_result, encode_result
from engine_svc.runner.executor import Call, LaunchedStep
from engine_svc.runner.input_batch import InputBatch
from engine_svc.runner.sampling.transfer import to_device

logger = logging.getLogger(__name__)

_ROOM_S = 60.0


class UnknownCall(RuntimeError):
    """The engine asked for something by a name that this rank does not know: a bug."""


class PlanRunner(Protocol):
    """Runs plans on this rank."""

    @property
    def batch(self) -> InputBatch:
        """The rows."""
        ...

    def execute(self, plan: StepPlan) -> LaunchedStep:
        """Do what the plan says."""
        ...


class AfterStep(Protocol):
    """What a rank does around a step, by its place."""

    def before(self, plan: StepPlan) -> None:
        """The step is about to run."""

    def after(self, plan: StepPlan, step: LaunchedStep) -> None:
        """The step is under way."""

    def settle(self) -> None:
        """Wait until nothing is under way."""


class RankLoop:
    """Deals with messages in their order until it is told to stop."""

    def __init__(
        self,
        messages: ChannelReader,
        decoder: PlanDecoder,
        runner: PlanRunner,
        part: AfterStep,
        *,
        calls: Mapping[str, Call],
        answer: Callable[[Mapping[str, object]], None],
        has_dealt: Callable[[], None],
    ) -> None:
        self._messages = messages
        self._decoder = decoder
        self._runner = runner
        self._part = part
        self._calls = calls
        self._answer = answer
        self._has_dealt = has_dealt  # with a message

    def run(self) -> None:
        """Until the message to stop."""
        while True:
            message = self._messages.receive()
            assert message is not None, "a wait without an end ended with nothing"
            kind, body = message[:1], message[1:]
            if kind == STOP:
                self._part.settle()
                return
            if kind == PLAN:
                self._step(self._decoder.decode(body))
            elif kind == CALL:
                self._call(**json.loads(body))
            self._has_dealt()

    def _step(self, plan: StepPlan) -> None:
        self._part.before(plan)
        self._part.after(plan, self._runner.execute(plan))

    def _call(self, name: str, arguments: Mapping[str, object]) -> None:
        if name not in self._calls:
            raise UnknownCall(f"{name!r} is not among {', '.join(sorted(self._calls))}")
        self._part.settle()
        self._answer(self._calls[name](arguments))


class Silent:
    """The part of a rank that samples what another one tells: it knows the tokens by itself."""

    def before(self, plan: StepPlan) -> None:
        """Nothing is missing."""

    def after(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Nobody waits for it."""

    def settle(self) -> None:
        """Nothing is under way."""


class Reporter:
    """The part of the rank that tells what was sampled.

    end_rank: where the device works by itself: results are told from a thread, so that the next plan is
    launched meanwhile, and the thread ends with a call of this with an error of a step.
    """

    def __init__(
        self,
        results: ChannelWriter,
        tokens: ChannelWriter | None,
        *,
        end_rank: Callable[[Exception], object] | None,
    ) -> None:
        self._results = results
        self._tokens = tokens  # for stages before, where there are any
        self._steps: SimpleQueue[LaunchedStep | threading.Event] | None = None
        if end_rank is not None:
            self._steps = SimpleQueue()
            threading.Thread(target=self._run, args=(end_rank,), name="results", daemon=True).start()

    def before(self, plan: StepPlan) -> None:
        """Nothing is missing: this rank samples."""

    def after(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Tell the result, now or when it is there."""
        if self._steps is None:
            self._report(step)
        else:
            self._steps.put(step)

    def settle(self) -> None:
        """Wait until all has been told."""
        if self._steps is not None:
            reported = threading.Event()
            self._steps.put(reported)
            reported.wait()

    def _run(self, end_rank: Callable[[Exception], object]) -> None:
        assert self._steps is not None, "a thread without a queue was started"
        try:
            while True:
                step = self._steps.get()
                if isinstance(step, threading.Event):
                    step.set()
                else:
                    self._report(step)
        except Exception as error:  # Whatever it is: the rank would go on, and the engine wait in vain.
            logger.exception("the result of a step cannot be told")
            end_rank(error)

    def _report(self, step: LaunchedStep) -> None:
        result = step.result()
        if self._tokens is not None:
            tokens = StepResult(result.step_number, result.sampled)
            self._tokens.send(encode_result(tokens), timeout_s=_ROOM_S)
        self._results.send(encode_result(result), timeout_s=_ROOM_S)


@dataclass(slots=True)
class _Expected:
    """A step whose tokens this stage has not heard of: where they will stand, by row of the plan."""

    step_number: int
    pending: dict[int, tuple[str, int]]  # request id and position

    def forget(self, released: set[str]) -> None:
        self.pending = {row: entry for row, entry in self.pending.items() if entry[0] not in released}


class EarlyStage:
    """The part of a stage that does not sample: it hears of tokens, before the first step that needs them."""

    def __init__(self, tokens: ChannelReader, batch: InputBatch) -> None:
        self._tokens = tokens
        self._batch = batch
        self._expected: deque[_Expected] = deque()

    def before(self, plan: StepPlan) -> None:
        """Write the tokens that the step needs; waits only for those."""
        released = set(plan.released)
        for expected in self._expected:
            expected.forget(released)
        rows = set(plan.request_ids)
        needed = 0
        for number, expected in enumerate(self._expected, start=1):
            if any(request_id in rows for request_id, _ in expected.pending.values()):
                needed = number
        self._take(needed)
        while self._expected and (message := self._tokens.receive(timeout_s=0.0)) is not None:
            self._write(decode_result(message))

    def after(self, plan: StepPlan, step: LaunchedStep) -> None:
        """The step's tokens will come."""
        pending = {
            row: (request_id, computed + count)
            for row, (request_id, computed, count, samples) in enumerate(
                zip(plan.request_ids, plan.num_computed_tokens, plan.num_tokens, plan.samples, strict=True)
            )
            if samples
        }
        self._expected.append(_Expected(plan.step_number, pending))

    def settle(self) -> None:
        """Wait for the tokens of all steps."""
        self._take(len(self._expected))

    def _take(self, count: int) -> None:
        for _ in range(count):
            message = self._tokens.receive()
            assert message is not None, "a wait without an end ended with nothing"
            self._write(decode_result(message))

    def _write(self, result: StepResult) -> None:
        expected = self._expected.popleft()
        assert result.step_number == expected.step_number, "results come in the order of the plans"
        rows: list[int] = []
        positions: list[int] = []
        token_ids: list[int] = []
        for index, (request_id, position) in expected.pending.items():
            # A row that has none ends with an error; steps already planned for it need some token anyhow.
            sampled = result.sampled[index] or [0]
            rows += [self._batch.row_of[request_id]] * len(sampled)
            positions += range(position, position + len(sampled))
            token_ids += sampled
        if rows:
            self._batch.append(np.array(rows), np.array(positions), _on(self._batch.device, token_ids))


def _on(device: torch.device, token_ids: list[int]) -> torch.Tensor:
    return to_device(np.array(token_ids, dtype=np.int64), device)
