"""The unified scheduler: every step gives each request some of its pending tokens, running requests first.

There is no prefill and no decode here: a request has known tokens, some of them computed, and a step computes
more. Knows no tensors, no clock and no optional feature.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.request import FinishReason, Request, RequestOutput, RequestStatus
from engine_svc.scheduler.budget import Budget
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.drafts import is_last_token_in_flight, note_drafts, pad_with_drafts, take_back
from engine_svc.scheduler.hook import SchedulerHook
from engine_svc.scheduler.plan_builder import NOTHING, PlanBuilder
from engine_svc.scheduler.policy import POLICIES, Policy
from engine_svc.scheduler.refusal import refusal
from engine_svc.scheduler.stats import SchedulerStats
from engine_svc.scheduler.stopping import max_num_tokens, why_stopped
from engine_svc.scheduler.waiting_queue import WaitingQueue
from engine_svc.step import StepPlan, StepResult


class Scheduler:
    """Decides what each step computes, and takes in what it yielded.

    Tokens count as computed when they are planned, so the next step can be planned before this one is done.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCache,
        hooks: Sequence[SchedulerHook] = (),
        budgets: Sequence[Budget] = (),
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._hooks = tuple(hooks)
        self._builder = PlanBuilder(config, budgets)
        self._policy: Policy = POLICIES[config.policy]()
        self._pause = PauseState.NONE

        self._requests: dict[str, Request] = {}
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # in order of admission
        # Rows of the plans whose results are still to come. By object, not by id: an id may be used again.
        self._in_flight: deque[tuple[int, list[Request]]] = deque()
        self._released: list[str] = []  # rows for the runner to free with the next plan

        self._step_number = 0
        self._updated_step_number = 0
        self._prefill_limit = 0  # of this step
        self._pads_newcomers = False  # in this step
        self._num_preemptions = 0
        self._num_chunked_prefills = 0
        self._max_rows = 0

    @property
    def has_work(self) -> bool:
        """Whether a step planned now could compute something."""
        if self._pause is PauseState.ALL:
            return False
        return bool(self._running) or (self._pause is PauseState.NONE and self._waiting.num_ready > 0)

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended: running, waiting and blocked."""
        return len(self._requests)

    @property
    def running_ids(self) -> list[str]:
        """Running requests, in order of admission."""
        return [request.request_id for request in self._running]

    @property
    def waiting_ids(self) -> list[str]:
        """Waiting and blocked requests, in the order in which they will be taken."""
        return [request.request_id for request in self._waiting]

    def stats(self) -> SchedulerStats:
        """State now, and counters since the start."""
        return SchedulerStats(
            step_number=self._step_number,
            num_running=len(self._running),
            num_waiting=self._waiting.num_ready,
            num_blocked=self._waiting.num_blocked,
            num_waiting_tokens=self._waiting.num_uncached_tokens,
            num_used_blocks=self._kv_cache.num_used_blocks,
            num_total_blocks=self._kv_cache.num_total_blocks,
            prefix_queries=self._kv_cache.prefix_queries,
            prefix_hits=self._kv_cache.prefix_hits,
            num_preemptions=self._num_preemptions,
            num_chunked_prefills=self._num_chunked_prefills,
            max_rows=self._max_rows,
        )

    def refusal(self, request: Request) -> str | None:
        """Why this request could never be served here, in words for its sender; None: it can be added."""
        if request.request_id in self._requests:
            return f"request {request.request_id} is already being served"
        return refusal(request, self._config, self._kv_cache)

    def add(self, request: Request) -> None:
        """Enter a new request into the queue. Ask `refusal` first."""
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id} is already being served")
        request.max_num_tokens = max_num_tokens(request, self._config.max_model_len)
        request.order_key = self._policy.order_key(request)
        self._requests[request.request_id] = request
        for hook in self._hooks:
            hook.on_add(request)
        if not request.blockers:
            request.move_to(RequestStatus.WAITING)
        self._enqueue(request)

    def unblock(self, request_id: str, name: str) -> None:
        """Take `name` off what blocks a request; without any it may be admitted. Unknown ids are ignored."""
        request = self._waiting.blocked(request_id)
        if request is None:
            return
        request.blockers.discard(name)
        if not request.blockers:
            self._waiting.remove(request)
            request.move_to(RequestStatus.WAITING)
            self._enqueue(request)

    def abort(self, request_ids: Iterable[str], now: float, cause: str = "") -> list[RequestOutput]:
        """End requests from outside, one after the other. Unknown, finished and repeated ids are ignored."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                request.abort_cause = cause
                request.timeline.events.append(("aborted", now))
                outputs.append(self._end_early(request, FinishReason.ABORT, now))
        return outputs

    def set_pause(self, state: PauseState) -> None:
        """Hold back everything, only admissions, or nothing, from the next plan on."""
        self._pause = state

    def reset_prefix_cache(self, now: float, *, reset_running: bool = False) -> bool:
        """Forget all cached content. Refused while requests hold blocks, unless they may be preempted."""
        if reset_running:
            while self._running:
                self._preempt(self._running[-1], now)
        return self._kv_cache.reset()

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step.

        A plan without rows need not be launched: what it would have released rides on the next one with rows.
        A plan with rows must come back through `update`, in the order of the plans.
        """
        self._step_number += 1
        plan = self._builder.begin(self._step_number)
        if self._pause is PauseState.ALL:
            return plan
        # A lone request has nobody to make room for.
        alone = len(self._running) + len(self._waiting) == 1
        self._prefill_limit = 0 if alone else self._config.long_prefill_token_threshold
        # Who was in the middle of a chunk before this step makes rows of unequal length.
        self._pads_newcomers = self._config.num_speculative_tokens > 0 and all(
            request.last_row_sampled for request in self._running
        )
        self._schedule_running(now)
        if not plan.preempted and self._pause is PauseState.NONE:
            self._admit_waiting(now)
        rows = self._builder.rows
        if not rows:
            return plan
        plan.released, self._released = self._released, []
        self._in_flight.append((plan.step_number, rows))
        self._max_rows = max(self._max_rows, len(rows))
        for hook in self._hooks:
            hook.on_plan(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what a plan yielded: append tokens, end who stops, note drafts."""
        if not plan.request_ids:
            return []
        step_number, rows = self._in_flight.popleft()
        assert step_number == plan.step_number == result.step_number, "results come in the order of the plans"
        assert len(result.sampled) == len(rows), "a result has an entry for each row"
        self._updated_step_number = step_number
        broken = [rows[row] for row in sorted(set(result.non_finite)) if not rows[row].is_finished]
        outputs = [self._end_early(request, FinishReason.ERROR, now) for request in broken]
        finished = RequestStatus.FINISHED
        for request, tokens, drafts in zip(rows, result.sampled, plan.draft_token_ids, strict=True):
            if not tokens or request.status is finished:
                continue
            if drafts:
                take_back(request, len(drafts) + 1 - len(tokens))
            output = RequestOutput(request.request_id, tokens)
            outputs.append(output)
            if request.timeline.first_token_at is None:
                _note_first_token(request, output, now)
            token_ids, end_token_ids, limit = request.token_ids, request.end_token_ids, request.max_num_tokens
            num_before = len(token_ids)
            ends = False
            for token in tokens:
                token_ids.append(token)
                if token in end_token_ids or len(token_ids) >= limit:
                    output.new_token_ids = token_ids[num_before:]
                    ends = True
                    break
            if request.num_placeholders:
                self._settle(request, len(output.new_token_ids))
            if ends:
                self._stop(request, output, now)
        if result.drafts:
            note_drafts(plan, rows, result.drafts)
        for hook in self._hooks:
            hook.on_update(plan, result)
        return outputs

    def _schedule_running(self, now: float) -> None:
        builder, tokens, max_model_len = self._builder, self._builder.tokens, self._config.max_model_len
        has_further_budgets = builder.has_further_budgets
        running = RequestStatus.RUNNING
        for request in self._running.copy():
            if not tokens.remaining:
                return
            # A victim of this step.
            if request.status is not running:
                continue
            computed, placeholders = request.num_computed_tokens, request.num_placeholders
            num_tokens = len(request.token_ids) + placeholders + len(request.draft_token_ids) - computed
            # One pending token that is known is the usual row: only a further budget could make it less.
            if num_tokens != 1 or placeholders or has_further_budgets:
                if placeholders and is_last_token_in_flight(request):
                    continue
                num_tokens = min(self._limit(num_tokens), max_model_len - 1 - computed)
                num_tokens = builder.clip(request, num_tokens)
                if num_tokens < 1:
                    continue
            new_block_ids = NOTHING
            if computed + num_tokens > request.quiet_until:
                grown = self._grow(request, num_tokens, now)
                if grown is None:
                    return
                new_block_ids = grown
            builder.place(request, num_tokens, new_block_ids)

    def _admit_waiting(self, now: float) -> None:
        config, kv_cache, builder = self._config, self._kv_cache, self._builder
        has_rows = bool(builder.rows)
        while builder.tokens.remaining and len(self._running) < config.max_num_seqs:
            request = self._waiting.first()
            # Tokens of a step in flight belong to a preempted request too, and it needs them to continue.
            if request is None or request.resumes_after_step > self._updated_step_number:
                return
            hit = kv_cache.match_prefix(request)
            num_cached = len(hit) * kv_cache.block_size
            wanted = request.num_tokens - num_cached
            if wanted == 1 and self._pads_newcomers and (has_rows or hit):
                wanted += pad_with_drafts(request, num_cached, config)
            wanted = self._limit(wanted)
            num_tokens = builder.clip(request, wanted)
            must_be_whole = request.draft_token_ids or not config.enable_chunked_prefill
            if (
                num_tokens < 1
                or (must_be_whole and num_tokens < wanted)
                or not kv_cache.admit(request, hit, num_tokens, reserve_all=config.reserve_full_prompt)
            ):
                # Nobody overtakes the head of the queue.
                request.draft_token_ids = []
                return
            self._enter(request, now)
            builder.place(request, num_tokens, request.block_table.copy())
            self._num_chunked_prefills += not request.last_row_sampled

    def _limit(self, num_tokens: int) -> int:
        """What the limit for long prefills leaves of so many tokens."""
        return min(num_tokens, self._prefill_limit) if self._prefill_limit else num_tokens

    def _grow(self, request: Request, num_tokens: int, now: float) -> list[int] | None:
        """Blocks for a running request, at the cost of others if need be; None: it had to go itself."""
        while True:
            new_block_ids = self._kv_cache.grow(request, num_tokens)
            if new_block_ids is not None:
                return new_block_ids
            victim = self._policy.pick_victim(self._running)
            self._builder.withdraw(victim)
            self._builder.plan.preempted.append(victim.request_id)
            self._preempt(victim, now)
            if victim is request:
                return None

    def _enter(self, request: Request, now: float) -> None:
        """Move the head of the queue among the running."""
        self._waiting.remove(request)
        request.move_to(RequestStatus.RUNNING)
        self._running.append(request)
        self._builder.admit(request)
        timeline = request.timeline
        if timeline.scheduled_at is None:
            timeline.scheduled_at = now
            request.num_cached_tokens = request.num_computed_tokens
            timeline.events.append(("scheduled", now))
        else:
            timeline.events.append(("resumed", now))

    def _preempt(self, request: Request, now: float) -> None:
        """Take a running request's blocks and queue it again; it will compute its tokens anew."""
        self._running.remove(request)
        self._released.append(request.request_id)
        self._kv_cache.release(request)
        request.move_to(RequestStatus.WAITING)
        request.num_computed_tokens = 0
        request.num_placeholders = 0
        request.draft_token_ids = []
        request.num_preemptions += 1
        request.resumes_after_step = self._in_flight[-1][0] if self._in_flight else 0
        request.timeline.events.append(("preempted", now))
        request.order_key = self._policy.requeue_key(request)
        self._enqueue(request)
        self._num_preemptions += 1

    def _enqueue(self, request: Request) -> None:
        num_cached = len(self._kv_cache.match_prefix(request)) * self._kv_cache.block_size
        request.num_uncached_tokens = request.num_tokens - num_cached
        self._waiting.add(request)

    def _settle(self, request: Request, num_tokens: int) -> None:
        """Placeholders became tokens; blocks that were full but unknown can be found from now on."""
        if request.status is RequestStatus.RUNNING:
            request.num_placeholders -= num_tokens
            self._kv_cache.commit(request, request.num_computed_tokens - request.num_placeholders)

    def _stop(self, request: Request, output: RequestOutput, now: float) -> None:
        stopped = why_stopped(request)
        assert stopped is not None, "only a request whose newest token ends it is stopped"
        output.finish_reason, output.stop_token_id = stopped
        self._finish(request, output.finish_reason, now)

    def _end_early(self, request: Request, reason: FinishReason, now: float) -> RequestOutput:
        self._finish(request, reason, now)
        output = RequestOutput(request.request_id, [], reason)
        if request.timeline.first_token_at is None:
            output.num_cached_tokens = request.num_cached_tokens
        return output

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a request wherever it is: its blocks are free at once, its row with the next plan."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
            self._released.append(request.request_id)
        else:
            self._waiting.remove(request)
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        request.timeline.finished_at = now
        self._kv_cache.release(request)
        del self._requests[request.request_id]
        for hook in self._hooks:
            hook.on_finish(request)


def _note_first_token(request: Request, output: RequestOutput, now: float) -> None:
    request.timeline.first_token_at = now
    request.timeline.events.append(("first_token", now))
    output.num_cached_tokens = request.num_cached_tokens
