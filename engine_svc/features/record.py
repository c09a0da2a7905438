"""Records the decisions of a scheduler as a case that can be replayed. Knows no wire, clock and tensors.

In a case, events come before a decision and tokens after it. Events between a decision and its tokens, e.g.
an abort during the forward pass, are recorded as a step of their own, in which the engine is paused and
decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from engine_svc.cache.block_pool import PLACEHOLDER_BLOCK_ID
from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import FinishReason, Request, RequestOutput
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.recorded_case import CaseFile, Fields, as_output, as_request, why_unrecordable
from engine_svc.scheduler.config import PauseState
from engine_svc.scheduler.scheduler import Scheduler
from engine_svc.scheduler.stats import SchedulerStats

# A replay reads the whole case, so its size is limited.
MAX_STEPS = 100_000
MAX_CHARACTERS = 1 << 30
# Limit of events without a step, e.g. while the engine is paused.
MAX_EVENTS = 10_000


class RecordedScheduler:
    """A scheduler for the loop and its controls that passes all calls on to another one and records them.

    The recording ends, while the engine continues, at anything that the format lacks: a blocked or resumable
    request, one with content keys, output or unsupported parameters, a row without a token, a failed step, a
    reset of the cache. It also ends after `max_steps` or `max_characters`. The case up to there can be
    replayed. The engine also continues if the file cannot be written.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: KVCache,
        case: CaseFile,
        *,
        max_steps: int = MAX_STEPS,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._case = case
        self._max_steps = max_steps
        self._max_characters = max_characters
        self._requests: dict[str, Request] = {}  # those that have not ended
        self._events: list[Fields] = []  # since the last decision
        self._finished: list[str] = []  # since the last decision
        self._pause = PauseState.NONE
        self._written_pause = PauseState.NONE  # the state of a replay at this point
        # By step number: the index in the case, and the rows, some of which may end in the meantime.
        self._in_flight: dict[int, tuple[int, list[Request]]] = {}
        self._coverage: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def running_ids(self) -> list[str]:
        return self._scheduler.running_ids

    @property
    def waiting_ids(self) -> list[str]:
        return self._scheduler.waiting_ids

    def stats(self) -> SchedulerStats:
        return self._scheduler.stats()

    def add(self, request: Request) -> None:
        self._scheduler.add(request)
        if not self._case.is_open:
            return
        # Checked afterwards, as hooks may block new requests.
        reason = why_unrecordable(request)
        if reason is not None:
            self._end(reason)
            return
        self._requests[request.request_id] = request
        self._coverage["requests"] += 1
        self._note({"op": "add", "request": as_request(request)})

    def abort(
        self,
        request_ids: Iterable[str],
        now: float,
        cause: str = "",
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[RequestOutput]:
        if not self._case.is_open:
            return self._scheduler.abort(request_ids, now, cause, reason)
        num_running = self._scheduler.stats().num_running
        outputs = self._scheduler.abort(request_ids, now, cause, reason)
        if outputs:
            ended = [output.request_id for output in outputs]
            num_running -= self._scheduler.stats().num_running
            self._coverage["abort_running"] += num_running
            self._coverage["abort_waiting"] += len(ended) - num_running
            self._finish(ended)
            self._note({"op": "abort", "ids": ended})
        return outputs

    def set_pause(self, state: PauseState) -> None:
        self._scheduler.set_pause(state)
        self._pause = state

    def reset_prefix_cache(self, now: float, *, reset_running: bool = False) -> bool:
        was_reset = self._scheduler.reset_prefix_cache(now, reset_running=reset_running)
        if was_reset or reset_running:
            self._end("a reset of the prefix cache")
        return was_reset

    def withdraw(self, now: float) -> None:
        self._end("a step that failed")
        self._scheduler.withdraw(now)

    def restrict(self, only: Collection[str] | None, now: float, max_num_tokens: int | None = None) -> None:
        # Not recorded: the recording ended when a step failed.
        self._scheduler.restrict(only, now, max_num_tokens)

    def schedule(self, now: float) -> StepPlan:
        if not self._case.is_open:
            self._forget()
            return self._scheduler.schedule(now)
        before = self._state()
        plan = self._scheduler.schedule(now)
        # A step in which nothing happens need not be replayed.
        if plan.request_ids or plan.preempted or self._state() != before:
            # By object and not by id: an id may be used again before the tokens come.
            rows = [self._requests[request_id] for request_id in plan.request_ids]
            decision = self._as_decision(plan, self._kv_cache.num_free_blocks)
            index = self._begin_step(self._pause, before, decision)
            if index is not None:
                self._count_rows(plan)
            if rows and index is not None:
                self._in_flight[plan.step_number] = (index, rows)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        if not self._case.is_open or plan.step_number not in self._in_flight:
            return self._scheduler.update(plan, result, now)
        if result.non_finite or result.barred:
            self._end("a row without a token")
            return self._scheduler.update(plan, result, now)
        index, rows = self._in_flight.pop(plan.step_number)
        if self._events:
            # They came after this decision and before its tokens.
            self._insert_step(self._state())
        self._count_tokens(plan, result, rows)
        sampled = [tokens.copy() for tokens in result.sampled]
        outputs = self._scheduler.update(plan, result, now)
        if not self._case.is_open:
            return outputs
        freed = [output.request_id for output in outputs if output.finish_reason is not None]
        self._finish(freed)
        update: Fields = {
            "for_step": index,
            "model": {
                "sampled": dict(zip(plan.request_ids, sampled, strict=True)),
                "drafts": result.drafts,
            },
            "expected": {
                # Not those of features alone.
                "outputs": [as_output(one) for one in outputs if one.new_token_ids or one.finish_reason],
                "freed": freed,
                **self._state(),
            },
        }
        self._case.add_update(update)
        return outputs

    def close(self) -> None:
        """Complete the file, because the engine ends. Events without a following decision are left out."""
        self._end("the engine ended")

    def _state(self) -> Fields:
        return {
            "free_blocks": self._kv_cache.num_free_blocks,
            "waiting": self._scheduler.waiting_ids,
            "running": self._scheduler.running_ids,
        }

    def _note(self, event: Fields) -> None:
        self._events.append(event)
        if len(self._events) >= MAX_EVENTS:
            self._insert_step(self._state())

    def _insert_step(self, state: Fields) -> None:
        """Write the events since the last decision as a step that decides nothing, as if paused."""
        self._begin_step(PauseState.ALL, state, self._as_decision(StepPlan(0), state["free_blocks"]))

    def _begin_step(self, pause: PauseState, state: Fields, decision: Fields) -> int | None:
        """Write a step: the events so far, the state after them, and the decision in this state of pause.

        Returns its index; None if the recording is over.
        """
        if self._case.num_steps >= self._max_steps:
            self._end(f"the limit of {self._max_steps} steps")
            return None
        if self._case.num_characters >= self._max_characters:
            self._end(f"the limit of {self._max_characters} characters")
            return None
        if pause is not self._written_pause:
            self._events.append({"op": "pause", "state": pause.value})
            self._written_pause = pause
            self._coverage[f"pause_{pause.value}"] += 1
        step: Fields = {"events": self._events, "after_events": state, "decision": decision}
        self._events, self._finished = [], []
        return self._case.begin_step(step)

    def _as_decision(self, plan: StepPlan, free_blocks: object) -> Fields:
        admitted = {entry.request_id: entry for entry in plan.admitted}
        resumed = {name for name in admitted if self._requests[name].num_preemptions}
        blocks: Fields = {}
        for name, new_block_ids in zip(plan.request_ids, plan.new_block_ids, strict=True):
            hit = admitted[name].block_ids if name in admitted else []
            blocks[name] = {"hit": self._per_group(hit), "new": self._per_group(new_block_ids)}
        computed = dict(zip(plan.request_ids, plan.num_computed_tokens, strict=True))
        drafts = zip(plan.request_ids, plan.draft_token_ids, strict=True)
        return {
            "scheduled": list(zip(plan.request_ids, plan.num_tokens, strict=True)),
            "new": [name for name in plan.request_ids if name in admitted and name not in resumed],
            "resumed": [name for name in plan.request_ids if name in resumed],
            "continued": [name for name in plan.request_ids if name not in admitted],
            "preempted": plan.preempted,
            "finished": sorted(self._finished),
            "computed": computed,
            "spec": {name: list(tokens) for name, tokens in drafts if tokens},
            "blocks": blocks,
            "free_blocks": free_blocks,
        }

    def _per_group(self, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        if not block_ids:
            return [[] for _ in range(self._kv_cache.num_groups)]
        return [[number for number in group if number != PLACEHOLDER_BLOCK_ID] for group in block_ids]

    def _count_rows(self, plan: StepPlan) -> None:
        admitted = {entry.request_id for entry in plan.admitted}
        computed = zip(plan.request_ids, plan.num_computed_tokens, strict=True)
        hits = [num_tokens for name, num_tokens in computed if name in admitted and num_tokens]
        self._coverage.update(
            scheduled_tokens=plan.total_num_tokens,
            preemptions=len(plan.preempted),
            resumes=sum(self._requests[name].num_preemptions > 0 for name in admitted),
            hit_requests=len(hits),
            hit_tokens=sum(hits),
        )

    def _count_tokens(self, plan: StepPlan, result: StepResult, rows: Sequence[Request]) -> None:
        for request, tokens, drafts in zip(rows, result.sampled, plan.draft_token_ids, strict=True):
            if tokens and request.is_finished:
                self._coverage["outputs_dropped"] += 1
            elif tokens and drafts:
                self._coverage["draft_accepted"] += len(tokens) - 1
                self._coverage["draft_rejected"] += len(drafts) + 1 - len(tokens)

    def _finish(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._finished.append(request_id)
            del self._requests[request_id]

    def _end(self, reason: str) -> None:
        self._coverage["steps"] = self._case.num_steps
        self._case.end(reason, self._coverage)

    def _forget(self) -> None:
        self._requests, self._in_flight = {}, {}
        self._events, self._finished = [], []
