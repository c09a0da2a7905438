"""A core loop without a model: a token a row a step, through the real Inbox and Outbox. Knows no wire.

An ADD is answered at once, with one step of all rows; one that asks for a single token ends in that step.
Beside that, so many steps of all rows come at a set interval when they are asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from engine_svc.core.request import FinishReason
from engine_svc.loop.mailbox import Abort, Add, Call, Inbox, Outbox, Stop
from engine_svc.loop.step_output import FinishedRow, StepOutput

# What is under way when the last step was published gets so long to leave the process.
_SETTLE_S = 0.02
_ID_STRIDE = 7919
_VOCABULARY_SIZE = 128_000
_MAX_ROWS = 4096


def token_ids(num_rows: int) -> list[int]:
    """A token for each row, spread over the vocabulary, the same in every step and for every contestant."""
    return [row * _ID_STRIDE % _VOCABULARY_SIZE for row in range(num_rows)]


@dataclass(slots=True)
class _Steps:
    """Steps that were asked for."""

    num_left: int
    interval_s: float
    on_done: Callable[[float], None]
    began_at_cpu_s: float


class SyntheticLoop:
    """What the engine's thread is to its sessions, with rows of one session at a time."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._token_ids = token_ids(_MAX_ROWS)
        self._step_number = 0
        self._outbox: Outbox | None = None
        # Replaced and never changed: a step that nobody has read yet may still refer to them.
        self._handles: list[int] = []
        self._ids: list[str] = []
        self._steps: _Steps | None = None

    def begin_steps(self, num_steps: int, interval_s: float, on_done: Callable[[float], None]) -> None:
        """Publish so many steps from now on; `on_done` gets the seconds of CPU the process took for them.

        May be called from any thread; `on_done` is called in the loop's.
        """

        def begin() -> None:
            self._steps = _Steps(num_steps, interval_s, on_done, time.process_time())

        self._inbox.put(Call(begin))

    def run(self) -> None:
        """Serve until told to stop."""
        due_at = time.monotonic()
        while True:
            if not self._read_inbox():
                return
            steps = self._steps
            if steps is None:
                self._inbox.wait(None)
                due_at = time.monotonic()
            elif steps.num_left:
                steps.num_left -= 1
                self._publish()
                if steps.interval_s:
                    due_at += steps.interval_s
                    time.sleep(max(0.0, due_at - time.monotonic()))
            else:
                time.sleep(_SETTLE_S)
                self._steps = None
                steps.on_done(time.process_time() - steps.began_at_cpu_s)

    def _read_inbox(self) -> bool:
        """Take in what waits and answer the ADDs; False when it is time to stop."""
        added: list[Add] = []
        aborted: set[str] = set()
        for command in self._inbox.take():
            match command:
                case Add():
                    added.append(command)
                case Abort(request_id):
                    aborted.add(request_id)
                case Call(work):
                    work()
                case Stop():
                    return False
        if added:
            self._answer(added)
        if aborted:
            self._abort(aborted)
        return True

    def _answer(self, added: list[Add]) -> None:
        self._outbox = added[0].outbox
        before = len(self._handles)
        self._handles = self._handles + [add.handle for add in added]
        self._ids = self._ids + [add.request.request_id for add in added]
        finished = [
            FinishedRow(before + place, FinishReason.LENGTH)
            for place, add in enumerate(added)
            if add.request.sampling.max_tokens == 1
        ]
        self._publish([(before + place, 0) for place in range(len(added))], finished)
        if finished:
            ended = {row.row for row in finished}
            self._keep([row for row in range(len(self._handles)) if row not in ended])

    def _abort(self, request_ids: set[str]) -> None:
        rows = [row for row, request_id in enumerate(self._ids) if request_id in request_ids]
        if not rows or self._outbox is None:
            return
        ends = [FinishedRow(place, FinishReason.ABORT) for place in range(len(rows))]
        handles = [self._handles[row] for row in rows]
        self._outbox.publish(StepOutput(self._step_number, handles, [0] * len(rows), [], ends))
        self._keep([row for row in range(len(self._ids)) if self._ids[row] not in request_ids])

    def _keep(self, rows: list[int]) -> None:
        self._handles = [self._handles[row] for row in rows]
        self._ids = [self._ids[row] for row in rows]

    def _publish(
        self, first: list[tuple[int, int]] | None = None, finished: list[FinishedRow] | None = None
    ) -> None:
        num_rows = len(self._handles)
        if not num_rows:
            # What is left then is what keeping the pace costs by itself.
            return
        self._step_number += 1
        step = StepOutput(
            self._step_number,
            self._handles,
            [1] * num_rows,
            self._token_ids[:num_rows],
            finished or [],
            first or [],
        )
        if self._outbox is not None:
            self._outbox.publish(step)
