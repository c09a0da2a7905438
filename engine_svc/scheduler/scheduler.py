"""The unified scheduler: every step gives each request some of its pending tokens, running requests first.

There is no prefill and no decode here: a request has known tokens, some of them computed, and a step computes
more. Knows no tensors, no clock and no optional feature.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from engine_svc.cache.kv_cache import NO_BLOCKS, KVCache, NewBlocks
from engine_svc.cache.prefix import PrefixHit
from engine_svc.core.request import Chunk, FinishReason, Request, RequestOutput, RequestStatus
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.admission import chunk_refusal, refusal
from engine_svc.scheduler.budget import Budget, Restriction
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.hook import SchedulerHook
from engine_svc.scheduler.in_flight import StepsInFlight
from engine_svc.scheduler.plan_builder import PlanBuilder
from engine_svc.scheduler.policy import Policy
from engine_svc.scheduler.request_queues import RequestQueues, note_first_token
from engine_svc.scheduler.speculation import (
    DraftCounter,
    is_last_token_in_flight,
    note_drafts,
    pad_with_drafts,
    roll_back_rejected,
)
from engine_svc.scheduler.stats import SchedulerStats, make_stats
from engine_svc.scheduler.stopping import note_limits, why_stopped
from engine_svc.scheduler.turns import INPUT, begin_turn, settle_turn


class Scheduler:
    """Decides what each step computes, and takes in what it yielded.

    Tokens count as computed when they are planned, so the next step can be planned before this one is done.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCache,
        policy: Policy,
        hooks: Sequence[SchedulerHook] = (),
        budgets: Sequence[Budget] = (),
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._policy = policy
        self._builder = PlanBuilder(config, (*policy.budgets, *budgets))
        self._hooks = tuple(hooks)
        self._queues = RequestQueues(kv_cache, policy, hooks)
        self._in_flight = StepsInFlight()
        self._pause = PauseState.NONE

        self._step_number = 0
        self._updated_step_number = 0
        self._prefill_limit = 0  # of this step
        self._pads_newcomers = False  # in this step
        self._has_running_rows = False  # in this step
        self._num_chunked_prefills = 0
        self._max_rows = 0
        self._drafts = DraftCounter()

    @property
    def has_work(self) -> bool:
        """Whether a step planned now could compute something."""
        if self._pause is PauseState.ALL:
            return False
        return bool(self._queues.running) or (
            self._pause is PauseState.NONE and self._queues.waiting.num_ready > 0
        )

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended: running, waiting and blocked."""
        return len(self._queues.requests)

    @property
    def running_ids(self) -> list[str]:
        """Running requests, in order of admission."""
        return [request.request_id for request in self._queues.running]

    @property
    def waiting_ids(self) -> list[str]:
        """Waiting and blocked requests, in the order in which they will be taken."""
        return [request.request_id for request in self._queues.waiting]

    def stats(self) -> SchedulerStats:
        """State now, and counters since the start."""
        return make_stats(
            self._queues,
            self._kv_cache,
            self._drafts.stats(),
            step_number=self._step_number,
            num_chunked_prefills=self._num_chunked_prefills,
            max_rows=self._max_rows,
        )

    def refusal(self, request: Request) -> str | None:
        """Why this request could never be served here, in words for its sender; None: it can be added."""
        if request.request_id in self._queues.requests:
            return f"request {request.request_id} is already being served"
        return refusal(request, self._config, self._kv_cache)

    def chunk_refusal(self, request_id: str, chunk: Chunk) -> str | None:
        """Why this further input could never be served here, in words for its sender; None: it can be."""
        return chunk_refusal(self._queues.requests.get(request_id), chunk, self._config, self._kv_cache)

    def add(self, request: Request) -> None:
        """Enter a new request into the queue. Ask `refusal` first."""
        if request.request_id in self._queues.requests:
            raise ValueError(f"request {request.request_id} is already being served")
        note_limits(request, self._config.max_model_len)
        self._queues.add(request)

    def extend(self, request_id: str, chunk: Chunk | None, now: float) -> list[RequestOutput]:
        """Continue a resumable request by a chunk, when its turn is over; None: there will be none.

        Ask `chunk_refusal` first. Unknown ids are ignored. Returns the last output of a request that ends.
        """
        request = self._queues.requests.get(request_id)
        if request is None:
            return []
        waits = INPUT in request.blockers
        if chunk is None:
            request.is_resumable = False
            return [self._queues.end_early(request, FinishReason.ABORT, now)] if waits else []
        if waits:
            begin_turn(request, chunk, self._config.max_model_len)
            self._queues.unblock(request, INPUT)
        else:
            request.chunks.append(chunk)
        return []

    def unblock(self, request_id: str, name: str) -> None:
        """Take `name` off what blocks a request; without any it may be admitted. Unknown ids are ignored."""
        assert name != INPUT, "only a further chunk ends the time between two turns"
        if (request := self._queues.waiting.blocked(request_id)) is not None:
            self._queues.unblock(request, name)

    def abort(
        self,
        request_ids: Iterable[str],
        now: float,
        cause: str = "",
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[RequestOutput]:
        """End requests from outside, one after the other. Unknown, finished and repeated ids are ignored."""
        outputs = []
        for request_id in request_ids:
            if (request := self._queues.requests.get(request_id)) is not None:
                request.abort_cause = cause
                request.timeline.events.append(("aborted", now))
                outputs.append(self._queues.end_early(request, reason, now))
        return outputs

    def set_pause(self, state: PauseState) -> None:
        """Hold back everything, only admissions, or nothing, from the next plan on."""
        self._pause = state

    def reset_prefix_cache(self, now: float, *, reset_running: bool = False) -> bool:
        """Forget all cached content. Refused while requests hold blocks, unless these may be taken."""
        if reset_running:
            while self._queues.running:
                self._preempt(self._queues.running[-1], now)
            while self._queues.reclaim():
                continue
        return self._kv_cache.reset()

    def withdraw(self, now: float) -> None:
        """Take back every step in flight, as none yields anything; its requests compute its tokens anew."""
        withdrawn = self._in_flight.withdraw()
        self._queues.release_again(withdrawn.released)
        # The last first: the request that gives way is mostly the next to be admitted again.
        for request in reversed(self._queues.running.copy()):
            if request in withdrawn.rows:
                preempt_settled(self._queues, request, now)
        # After the releases: a block that one request fills may have been taken over by another already.
        self._kv_cache.invalidate([*withdrawn.block_ids, *self._kv_cache.take_registered()])
        for hook in self._hooks:
            hook.on_withdraw()
        # Nobody is to wait for tokens that never come.
        self._updated_step_number = self._step_number

    def restrict(self, only: Collection[str] | None, now: float, max_num_tokens: int | None = None) -> None:
        """Let only these requests run, on so many tokens a step; the others wait, without blocks.

        None: all again. No step may be in flight. The tokens are more where a row could not be divided.
        """
        limit = self._config.max_num_batched_tokens
        if max_num_tokens is not None and self._config.enable_chunked_prefill:
            limit = min(limit, max(max_num_tokens, 1 + self._config.num_speculative_tokens))
        self._builder.restrict(None if only is None else Restriction(only, limit))
        for request in reversed(self._queues.running.copy()):
            if only is not None and request.request_id not in only:
                preempt_settled(self._queues, request, now)

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step.

        A plan without rows need not be launched: what it would have released rides on the next one with rows.
        A plan with rows must come back through `update`, in the order of the plans.
        """
        self._step_number += 1
        plan = self._builder.begin(self._step_number)
        if self._pause is PauseState.ALL:
            return plan
        queues = self._queues
        # A lone request has nobody to make room for.
        self._prefill_limit = 0 if len(queues.requests) == 1 else self._config.long_prefill_token_threshold
        # Who was in the middle of a chunk before this step makes rows of unequal length.
        self._pads_newcomers = self._config.num_speculative_tokens > 0 and all(
            request.last_row_sampled for request in queues.running
        )
        self._schedule_running(now)
        if not plan.preempted and self._pause is PauseState.NONE:
            self._admit_waiting(now)
        rows = self._builder.rows
        if not rows:
            return plan
        plan.released, queues.released = queues.released, []
        registered = self._kv_cache.take_registered()
        self._in_flight.push(plan.step_number, rows, plan.num_tokens, plan.released, registered)
        self._max_rows = max(self._max_rows, len(rows))
        for hook in self._hooks:
            hook.on_plan(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what a plan yielded: append tokens, end who stops, note drafts."""
        if not plan.request_ids:
            return []
        rows = self._in_flight.pop(plan.step_number)
        assert result.step_number == plan.step_number, "a result belongs to its plan"
        assert len(result.sampled) == len(rows), "a result has an entry for each row"
        self._updated_step_number = plan.step_number
        broken = [(rows[row], why) for row, why in result.faults() if not rows[row].is_finished]
        outputs = [self._queues.end_broken(request, why, now) for request, why in broken]
        finished = RequestStatus.FINISHED
        for request, tokens, drafts in zip(rows, result.sampled, plan.draft_token_ids, strict=True):
            if not tokens or request.status is finished:
                continue
            if drafts:
                roll_back_rejected(request, len(drafts) + 1 - len(tokens))
                self._drafts.add(len(drafts), len(tokens) - 1)
            output = RequestOutput(request.request_id, tokens)
            outputs.append(output)
            if request.timeline.first_token_at is None:
                note_first_token(request, output, now)
            token_ids, end_token_ids = request.token_ids, request.end_token_ids
            check_from = request.check_from
            num_before = len(token_ids)
            stopped = None
            for token in tokens:
                token_ids.append(token)
                if token in end_token_ids or len(token_ids) >= check_from:
                    stopped = why_stopped(request)
                    if stopped is not None:
                        output.new_token_ids = token_ids[num_before:]
                        break
            if request.num_placeholders:
                self._settle(request, len(output.new_token_ids))
            if stopped is not None:
                self._stop(request, output, stopped, now)
        if result.drafts:
            note_drafts(plan, rows, result.drafts)
        for hook in self._hooks:
            hook.on_update(plan, result)
        return outputs

    def _schedule_running(self, now: float) -> None:
        builder = self._builder
        has_budgets = builder.has_budgets
        running = RequestStatus.RUNNING
        for request in self._policy.walk(self._queues.running, self._num_admissible()):
            if not builder.remaining:
                return
            # A victim of this step.
            if request.status is not running:
                continue
            computed = request.num_computed_tokens
            num_tokens = len(request.token_ids) + request.num_placeholders - computed
            num_tokens += len(request.draft_token_ids)
            # The usual row is one pending token, not the last: only a further budget could make it less.
            if num_tokens != 1 or computed + 2 >= request.max_num_tokens or has_budgets:
                num_tokens = self._grant(request, num_tokens)
                if num_tokens < 1:
                    continue
            new_block_ids = NO_BLOCKS
            if computed + num_tokens > request.quiet_until:
                grown = self._grow(request, num_tokens, now)
                if grown is None:
                    return
                new_block_ids = grown
            builder.add_row(request, num_tokens, new_block_ids)

    def _num_admissible(self) -> int:
        if self._pause is not PauseState.NONE:
            return 0
        return min(self._queues.waiting.num_ready, self._config.max_num_seqs - len(self._queues.running))

    def _grant(self, request: Request, num_tokens: int) -> int:
        """How many of its pending tokens a running request can have."""
        if request.num_placeholders and is_last_token_in_flight(request):
            return 0
        num_tokens = min(
            self._limit(num_tokens), self._config.max_model_len - 1 - request.num_computed_tokens
        )
        return self._builder.clip(request, num_tokens)

    def _admit_waiting(self, now: float) -> None:
        config, queues, builder = self._config, self._queues, self._builder
        self._has_running_rows = bool(builder.rows)
        index = 0
        while builder.remaining and len(queues.running) < config.max_num_seqs:
            request = queues.waiting.at(index)
            if request is None:
                return
            # Tokens of a step in flight belong to a preempted request too, and it needs them to continue.
            waits_for_tokens = request.resumes_after_step > self._updated_step_number
            if waits_for_tokens or not builder.admits(request):
                index += 1
                continue
            if not self._admit(request, now):
                # Nobody overtakes who only has to wait for room.
                return

    def _admit(self, request: Request, now: float) -> bool:
        config, kv_cache, builder = self._config, self._kv_cache, self._builder
        hit = kv_cache.match_prefix(request)
        num_computed = request.num_computed_tokens
        # Budgets go by where a row begins, so they see what is about to be taken over.
        request.num_computed_tokens = num_known = hit.num_tokens or num_computed
        wanted = request.num_tokens - num_known
        if wanted == 1 and self._pads_newcomers and (self._has_running_rows or num_known):
            wanted += pad_with_drafts(request, num_known, config)
        wanted = self._limit(wanted)
        num_tokens = builder.clip(request, wanted)
        must_be_whole = request.draft_token_ids or not config.enable_chunked_prefill
        new_block_ids = None
        if num_tokens >= 1 and not (must_be_whole and num_tokens < wanted):
            new_block_ids = self._make_room(request, hit, num_tokens)
        if new_block_ids is None:
            request.draft_token_ids, request.num_computed_tokens = [], num_computed
            return False
        self._queues.enter(request, now)
        builder.admit(request, new_block_ids)
        builder.add_row(request, num_tokens, new_block_ids)
        self._num_chunked_prefills += not request.last_row_sampled
        return True

    def _make_room(self, request: Request, hit: PrefixHit, num_tokens: int) -> NewBlocks | None:
        """Blocks for a request that enters; with nobody running, at the cost of idle ones."""
        kv_cache, reserve_all = self._kv_cache, self._config.reserve_full_prompt
        new_block_ids = kv_cache.admit(request, hit, num_tokens, reserve_all=reserve_all)
        while new_block_ids is None and not self._queues.running and self._queues.reclaim(besides=request):
            new_block_ids = kv_cache.admit(request, hit, num_tokens, reserve_all=reserve_all)
        return new_block_ids

    def _limit(self, num_tokens: int) -> int:
        """What the limit for long prefills leaves of so many tokens."""
        return min(num_tokens, self._prefill_limit) if self._prefill_limit else num_tokens

    def _grow(self, request: Request, num_tokens: int, now: float) -> NewBlocks | None:
        """Blocks for a running request, at the cost of others if need be; None: it had to go itself."""
        num_in_flight_tokens = self._in_flight.num_tokens_of(request) if self._kv_cache.gives_back else 0
        while True:
            new_block_ids = self._kv_cache.grow(request, num_tokens, num_in_flight_tokens)
            if new_block_ids is not None:
                return new_block_ids
            if self._queues.reclaim():
                continue
            victim = self._policy.pick_victim(self._queues.running, self._kv_cache)
            num_withdrawn_tokens = self._builder.withdraw(victim)
            self._builder.plan.preempted.append(victim.request_id)
            self._preempt(victim, now, num_withdrawn_tokens)
            if victim is request:
                return None

    def _preempt(self, request: Request, now: float, num_withdrawn_tokens: int = 0) -> None:
        request.resumes_after_step = self._in_flight.newest_of(request)
        self._queues.preempt(request, now, num_withdrawn_tokens)

    def _settle(self, request: Request, num_tokens: int) -> None:
        """Placeholders became tokens; blocks that were full but unknown can be found from now on."""
        request.num_placeholders -= num_tokens
        num_settled_tokens = request.num_computed_tokens - request.num_placeholders
        if num_settled_tokens >= request.registers_at:
            self._kv_cache.commit(request, num_settled_tokens)

    def _stop(
        self, request: Request, output: RequestOutput, stopped: tuple[FinishReason, int | None], now: float
    ) -> None:
        """End a request whose newest token ends it, or its turn."""
        output.finish_reason, output.stop_token_id = stopped
        if not request.is_resumable and not request.chunks:
            self._queues.finish(request, output.finish_reason, now)
            return
        output.continues = True
        self._in_flight.forget(request)
        settle_turn(request, self._kv_cache.hasher.block_size)
        self._queues.end_turn(request)
        if request.chunks:
            begin_turn(request, request.chunks.popleft(), self._config.max_model_len)
            self._queues.unblock(request, INPUT)


def preempt_settled(queues: RequestQueues, request: Request, now: float) -> None:
    """Queue a running request again, for which nothing is in flight."""
    assert request.status is RequestStatus.RUNNING, f"request {request.request_id} does not run"
    request.resumes_after_step = 0
    queues.preempt(request, now, 0)
