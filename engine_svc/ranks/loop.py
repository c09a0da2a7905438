"""The loop of a rank: reads messages, runs plans, and reports sampled tokens if that is its part.

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

from engine_svc.core.extras import NO_EXTRAS, ExtraCodec
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.ranks.plan_channel import ChannelReader, ChannelWriter
from engine_svc.ranks.plan_codec import CALL, DROP, PLAN, PREPARE, STOP, PlanDecoder, decode_preparation
from engine_svc.ranks.result_codec import decode_result, encode_result
from engine_svc.runner.executor import Call, LaunchedStep, PlanRunner
from engine_svc.runner.input_batch import InputBatch
from engine_svc.runner.preparer import Preparer
from engine_svc.runner.sampling.transfer import to_device

logger = logging.getLogger(__name__)

_ROOM_S = 60.0


class UnknownCall(RuntimeError):
    """The engine called something by a name that this rank does not know: a bug."""


class AfterStep(Protocol):
    """The work of a rank before and after a step, depending on its position."""

    def before(self, plan: StepPlan) -> None: ...

    def after(self, plan: StepPlan, step: LaunchedStep) -> None: ...

    def settle(self) -> None:
        """Wait until nothing is in flight."""


class RankLoop:
    """Handles messages in order until the message to stop."""

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
        preparer: Preparer | None = None,
        extras: ExtraCodec = NO_EXTRAS,
    ) -> None:
        """preparer: None for a rank that prepares nothing. extras: the types of what is prepared."""
        self._messages = messages
        self._decoder = decoder
        self._runner = runner
        self._part = part
        self._calls = calls
        self._answer = answer
        self._has_dealt = has_dealt  # called after each message
        self._preparer = preparer
        self._extras = extras

    def run(self) -> None:
        while True:
            message = self._messages.receive()
            assert message is not None, "a receive without timeout returned no message"
            kind, body = message[:1], message[1:]
            if kind == STOP:
                self._part.settle()
                if self._preparer is not None:
                    self._preparer.stop_preparing()
                return
            if kind == PLAN:
                self._step(self._decoder.decode(body))
            elif kind == CALL:
                self._call(**json.loads(body))
            elif self._preparer is not None and kind == PREPARE:
                self._preparer.prepare(*decode_preparation(body, self._extras))
            elif self._preparer is not None and kind == DROP:
                self._preparer.drop_prepared(body.decode())
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
    """A rank that samples the same tokens as the rank that reports: it reports nothing."""

    def before(self, plan: StepPlan) -> None: ...

    def after(self, plan: StepPlan, step: LaunchedStep) -> None: ...

    def settle(self) -> None: ...


class Reporter:
    """The rank that reports sampled tokens.

    end_rank: set if the device works asynchronously. Results are then reported by a thread, so that the next
    plan is launched meanwhile. The thread calls end_rank with the error of a step, and ends.
    """

    def __init__(
        self,
        results: ChannelWriter,
        tokens: ChannelWriter | None,
        *,
        end_rank: Callable[[Exception], object] | None,
        extras: ExtraCodec = NO_EXTRAS,
    ) -> None:
        self._extras = extras
        self._results = results
        self._tokens = tokens  # for earlier stages, if there are any
        self._steps: SimpleQueue[LaunchedStep | threading.Event] | None = None
        if end_rank is not None:
            self._steps = SimpleQueue()
            threading.Thread(target=self._run, args=(end_rank,), name="results", daemon=True).start()

    def before(self, plan: StepPlan) -> None: ...

    def after(self, plan: StepPlan, step: LaunchedStep) -> None:
        """Report the result, now or when it is available."""
        if self._steps is None:
            self._report(step)
        else:
            self._steps.put(step)

    def settle(self) -> None:
        """Wait until all results are reported."""
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
        except Exception as error:  # Otherwise the rank would go on, and the engine would wait in vain.
            logger.exception("the result of a step cannot be sent")
            end_rank(error)

    def _report(self, step: LaunchedStep) -> None:
        result = step.result()
        if self._tokens is not None:
            tokens = StepResult(result.step_number, result.sampled)
            self._tokens.send(encode_result(tokens), timeout_s=_ROOM_S)
        self._results.send(encode_result(result, self._extras), timeout_s=_ROOM_S)


@dataclass(slots=True)
class _Expected:
    """A step whose tokens this stage has not received yet, and their positions, by row of the plan."""

    step_number: int
    pending: dict[int, tuple[str, int]]  # request id and position

    def forget(self, released: set[str]) -> None:
        self.pending = {row: entry for row, entry in self.pending.items() if entry[0] not in released}


class EarlyStage:
    """A stage that does not sample: receives tokens before the first step that needs them."""

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
        pending = {
            row: (request_id, computed + count)
            for row, (request_id, computed, count, samples) in enumerate(
                zip(plan.request_ids, plan.num_computed_tokens, plan.num_tokens, plan.samples, strict=True)
            )
            if samples
        }
        self._expected.append(_Expected(plan.step_number, pending))

    def settle(self) -> None:
        self._take(len(self._expected))

    def _take(self, count: int) -> None:
        for _ in range(count):
            message = self._tokens.receive()
            assert message is not None, "a receive without timeout returned no message"
            self._write(decode_result(message))

    def _write(self, result: StepResult) -> None:
        expected = self._expected.popleft()
        assert result.step_number == expected.step_number, "results come in the order of the plans"
        rows: list[int] = []
        positions: list[int] = []
        token_ids: list[int] = []
        for index, (request_id, position) in expected.pending.items():
            # A row without a token ends with an error. Steps already planned for it still need some token.
            sampled = result.sampled[index] or [0]
            rows += [self._batch.row_of[request_id]] * len(sampled)
            positions += range(position, position + len(sampled))
            token_ids += sampled
        if rows:
            self._batch.append(np.array(rows), np.array(positions), _on(self._batch.device, token_ids))


def _on(device: torch.device, token_ids: list[int]) -> torch.Tensor:
    return to_device(np.array(token_ids, dtype=np.int64), device)
