"""The unified scheduler: every step computes some pending tokens of each request, running requests first.

It does not distinguish prefill and decode: a request has known tokens, some of them computed, and a step
computes more. Knows no tensors, no clock and no optional feature.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from engine_svc.cache.kv_cache import NO_BLOCKS, KVCache, NewBlocks
from engine_svc.cache.prefix import PrefixHit
from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import Extra
from engine_svc.core.request import (
    NO_STOP_TOKEN,
    DraftUse,
    FinishReason,
    InputSegment,
    Request,
    RequestOutput,
    RequestStatus,
)
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.admission import refusal, segment_refusal
from engine_svc.scheduler.budget import Budget, PipelineTurns, Restriction
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from engine_svc.scheduler.feature import SchedulerFeature, overriding, verdict_of
from engine_svc.scheduler.in_flight import PlannedSteps
from engine_svc.scheduler.plan_builder import PlanBuilder
from engine_svc.scheduler.policy import Policy
from engine_svc.scheduler.request_queues import RequestQueues, note_first_token
from engine_svc.scheduler.stats import (
    FREE_BLOCKS,
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    PAUSED,
    SchedulerStats,
)
from engine_svc.scheduler.turns import INPUT, cancel_turn, note_limits, why_stopped
from engine_svc.speculation.accounting import (
    DraftCounter,
    DraftGrants,
    is_last_token_in_flight,
    note_drafts,
    pad_with_drafts,
    roll_back_rejected,
)
from engine_svc.speculation.limit import make_limit


class Scheduler:
    """Decides what each step computes, and applies its result.

    Tokens count as computed when they are planned, so that the next step can be planned before this one ends.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCache,
        policy: Policy,
        features: Sequence[SchedulerFeature] = (),
        budgets: Sequence[Budget] = (),
    ) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._policy = policy
        self._displaces = policy.displaces
        turns = (
            (PipelineTurns(config.pipeline_stages),)
            if config.async_scheduling and config.pipeline_stages > 1
            else ()
        )
        self._builder = PlanBuilder(
            config,
            (*policy.budgets, *turns, *budgets),
            policy.prefill_budgets,
            [feature.budget for feature in features if feature.budget is not None],
        )
        self._common_prefix = _CommonPrefix(kv_cache)
        self._drafts = DraftCounter()
        self._draft_grants: DraftGrants | None = None
        if config.drafts_at_launch:
            limit = make_limit(config.step_costs, config.num_speculative_tokens)
            self._draft_grants = DraftGrants(limit)
            features = (*features, _ForgetDrafts(self._draft_grants))
        self._features = tuple(features)
        self._on_step = overriding(features, "on_step")
        self._on_pressure = overriding(features, "on_pressure")
        self._on_exhausted = overriding(features, "on_exhausted")
        self._on_not_admitted = overriding(features, "on_not_admitted")
        self._on_plan, self._on_update = overriding(features, "on_plan"), overriding(features, "on_update")
        self._queues = RequestQueues(kv_cache, policy, self._features, holds_idle=config.holds_idle)
        self._in_flight = PlannedSteps()
        self._pause = PauseState.NONE

        self._step_number = 0
        self._updated_step_number = 0
        self._prefill_limit = 0  # of this step
        self._num_rows = 0  # of requests that run, at most, in this step
        self._pads_newcomers = False  # in this step
        self._has_running_rows = False  # in this step
        self._admission_limit = ""  # of the newest plan
        self._num_chunked_prefills = 0
        self._num_non_finite_rows = 0
        self._max_rows = 0

    @property
    def has_work(self) -> bool:
        """Whether a step planned now could compute something."""
        if self._pause is PauseState.ALL:
            return False
        if self._queues.running:
            return True
        return self._queues.waiting.num_ready > 0 and (
            self._pause is PauseState.NONE or (self._config.holds_idle and self._queues.has_ready_holder)
        )

    @property
    def running_ids(self) -> list[str]:
        """Running requests, in order of admission."""
        return [request.request_id for request in self._queues.running]

    @property
    def waiting_ids(self) -> list[str]:
        """Waiting and blocked requests, in the order of their keys."""
        return [request.request_id for request in self._queues.waiting]

    def stats(self) -> SchedulerStats:
        queues, kv_cache = self._queues, self._kv_cache
        return SchedulerStats(
            step_number=self._step_number,
            num_running=len(queues.running),
            num_waiting=queues.waiting.num_ready,
            num_blocked=queues.waiting.num_blocked,
            num_waiting_tokens=queues.waiting.num_uncached_tokens,
            num_used_blocks=kv_cache.num_used_blocks,
            num_total_blocks=kv_cache.num_total_blocks,
            prefix_queries=kv_cache.prefix_queries,
            prefix_hits=kv_cache.prefix_hits,
            prefix_hit_rate=kv_cache.hit_rate.value,
            preempted_queries=kv_cache.preempted_queries,
            preempted_hits=kv_cache.preempted_hits,
            num_preemptions=queues.num_preemptions,
            num_chunked_prefills=self._num_chunked_prefills,
            max_rows=self._max_rows,
            num_non_finite_rows=self._num_non_finite_rows,
            drafts=self._drafts.stats(),
            num_resumable=queues.num_resumable,
            num_idle=queues.num_idle,
            num_retained_lots=len(kv_cache.retained),
            num_retained_blocks=kv_cache.retained.num_blocks,
            admission_limit=self._admission_limit if self._pause is PauseState.NONE else PAUSED,
        )

    def refusal(self, request: Request) -> str | None:
        """Why this request can never be served here, as a message for the client; None: it can be added."""
        if request.request_id in self._queues.requests:
            return f"request {request.request_id} is already being served"
        return refusal(request, self._config, self._kv_cache)

    def segment_refusal(self, request_id: str, segment: InputSegment) -> str | None:
        """Why this further input can never be served here, as a message for the client; None: it can be."""
        return segment_refusal(self._queues.requests.get(request_id), segment, self._config, self._kv_cache)

    def add(self, request: Request) -> None:
        """Add a new request to the waiting queue. Check `refusal` first."""
        if request.request_id in self._queues.requests:
            raise ValueError(f"request {request.request_id} is already being served")
        note_limits(request, self._config.max_model_len)
        self._queues.add(request)

    def extend(self, request_id: str, segment: InputSegment | None, now: float) -> list[RequestOutput]:
        """Continue a resumable request with an input segment when its turn is over; None: no more input.

        Check `segment_refusal` first. Unknown ids are ignored. Returns the final output if the request ends.
        """
        request = self._queues.requests.get(request_id)
        if request is None:
            return []
        waits = INPUT in request.blockers
        if waits and segment is not None:
            self._queues.begin_turn(request, segment, self._config.max_model_len, now)
        elif segment is not None:
            request.segments.append(segment)
        else:
            self._queues.num_resumable -= request.is_resumable
            request.is_resumable = False
            return [self._queues.end_early(request, FinishReason.ABORT, now)] if waits else []
        return []

    def cancel_turn(self, request_id: str) -> None:
        """End the turn of a request with its next token. One that waits for input is ignored."""
        request = self._queues.requests.get(request_id)
        if request is not None and INPUT not in request.blockers:
            cancel_turn(request)

    def unblock(self, request_id: str, name: str) -> None:
        """Remove a blocker of a request; without blockers it may be admitted. Unknown ids are ignored."""
        assert name != INPUT, "only an input segment begins the next turn"
        if (request := self._queues.waiting.blocked(request_id)) is not None:
            self._queues.unblock(request, name)

    def abort(
        self,
        request_ids: Iterable[str],
        now: float,
        cause: str = "",
        reason: FinishReason = FinishReason.ABORT,
    ) -> list[RequestOutput]:
        """End requests from outside. Unknown, finished and repeated ids are ignored."""
        outputs = []
        for request_id in request_ids:
            if (request := self._queues.requests.get(request_id)) is not None:
                request.abort_cause = cause
                request.timeline.events.append(("aborted", now))
                outputs.append(self._queues.end_early(request, reason, now))
        return outputs

    def note(self, request_id: str, note: Extra, now: float) -> None:
        """Pass what a frontend says of a request, which may have ended, to the features."""
        for feature in self._features:
            feature.on_note(request_id, note, now)

    def set_pause(self, state: PauseState) -> None:
        """Hold back everything, only admissions, or nothing, from the next plan on."""
        self._pause = state

    def reset_prefix_cache(self, now: float, *, reset_running: bool = False) -> bool:
        """Clear the prefix cache and what is retained. Refused while requests hold blocks.

        reset_running: preempts running requests first. They continue at once: what is in flight for them is
        dropped and computed anew.
        """
        if reset_running:
            for request in reversed(self._queues.running.copy()):
                self._in_flight.forget(request)
                self._preempt(request, now)
            while self._queues.reclaim():
                continue
        if not self._kv_cache.reset():
            return False
        for feature in self._features:
            feature.on_reset()
        return True

    def withdraw(self, now: float) -> None:
        """Roll back every step in flight, as none produces a result; its tokens are computed anew."""
        withdrawn = self._in_flight.withdraw()
        self._queues.release_again(withdrawn.released)
        # The last first: the request preempted last is mostly the next to be admitted again.
        for request in reversed(self._queues.running.copy()):
            if request in withdrawn.rows:
                self._preempt(request, now)
        # After the releases: a block that one request fills may have been taken over by another already.
        self._kv_cache.invalidate([*withdrawn.block_ids, *self._kv_cache.take_registered()])
        for feature in self._features:
            feature.on_withdraw()
        # Otherwise preempted requests would wait for tokens that never come.
        self._updated_step_number = self._step_number

    def restrict(self, only: Collection[str] | None, now: float, max_num_tokens: int | None = None) -> None:
        """Let only these requests run, with at most `max_num_tokens` per step; others wait without blocks.

        None: no restriction. No step of other requests may be in flight. Rows that cannot be divided may have
        more tokens.
        """
        limit = self._config.max_num_batched_tokens
        if max_num_tokens is not None and self._config.enable_chunked_prefill:
            limit = min(limit, max(max_num_tokens, 1 + self._config.num_speculative_tokens))
        self._builder.restrict(None if only is None else Restriction(only, limit))
        for request in reversed(self._queues.running.copy()):
            if only is not None and request.request_id not in only:
                self._preempt(request, now)

    def on_idle(self, now: float) -> float | None:
        """Nothing can be computed at present. Returns when to call it again at the latest; None: never."""
        due = [due_at for on_step in self._on_step if (due_at := on_step(now)) is not None]
        return min(due, default=None)

    def schedule(self, now: float) -> StepPlan:
        """Plan the next step.

        A plan without rows need not be launched: its releases go into the next plan with rows. The result of
        a plan with rows must be given to `update`, in the order of the plans.
        """
        for on_step in self._on_step:
            on_step(now)
        self._step_number += 1
        plan = self._builder.begin(self._step_number)
        if self._pause is PauseState.ALL:
            return plan
        queues = self._queues
        num_held_rows = queues.num_idle if self._config.holds_idle else 0
        self._num_rows = self._config.max_num_seqs - num_held_rows
        # A lone request need not leave room for others.
        self._prefill_limit = 0 if len(queues.requests) == 1 else self._config.long_prefill_token_threshold
        if self._displaces and self._pause is PauseState.NONE and queues.waiting.num_ready:
            self._displace(now)
        num_displaced = len(plan.preempted)
        if self._draft_grants is not None:
            self._draft_grants.grant(queues.running)
        # A request in the middle of its prompt makes rows of unequal length anyway.
        self._pads_newcomers = (
            self._config.num_speculative_tokens > 0
            and self._draft_grants is None
            and all(request.last_row_sampled for request in queues.running)
        )
        self._schedule_running(now)
        if len(plan.preempted) > num_displaced:
            self._admission_limit = FREE_BLOCKS
        elif self._pause is PauseState.NONE or self._config.holds_idle:
            self._admission_limit = self._admit_waiting(now)
        rows = self._builder.rows
        # Also without rows, as states of the newest steps are not shared yet.
        registered = self._kv_cache.take_registered()
        if not rows:
            return plan
        plan.released, queues.released = queues.released, []
        if self._config.enable_common_prefix:
            plan.num_common_blocks = self._common_prefix.count(plan, rows)
        self._in_flight.push(plan.step_number, rows, plan.num_tokens, plan.released, registered)
        self._max_rows = max(self._max_rows, len(rows))
        self._policy.on_plan(plan, rows)
        for on_plan in self._on_plan:
            on_plan(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult, now: float) -> list[RequestOutput]:
        """Apply the result of a plan: append tokens, end requests that stop, keep drafts."""
        if not plan.request_ids:
            return []
        rows = self._in_flight.pop(plan.step_number)
        assert result.step_number == plan.step_number, "a result belongs to its plan"
        assert len(result.sampled) == len(rows), "a result has an entry for each row"
        self._updated_step_number = plan.step_number
        self._num_non_finite_rows += sum(not rows[row].is_finished for row in result.non_finite)
        broken = [(row, why) for row, why in result.faults() if not rows[row].is_finished]
        outputs = [
            self._queues.end_broken(rows[row], why, now, is_barred=row in result.barred)
            for row, why in broken
        ]
        finished = RequestStatus.FINISHED
        columns = zip(rows, result.sampled, plan.draft_token_ids, range(len(rows)), strict=True)
        for request, tokens, drafts, row in columns:
            if request.status is finished:
                continue
            if not tokens:
                if not request.samples and plan.num_computed_tokens[row] + plan.num_tokens[row] >= len(
                    request.token_ids
                ):
                    outputs.append(self._queues.end_computed(request, now))
                continue
            if drafts:
                roll_back_rejected(request, len(drafts) + 1 - len(tokens))
                num_drafts = result.num_drafts[row] if result.num_drafts else len(drafts)
                if num_drafts:
                    self._drafts.add(num_drafts, len(tokens) - 1)
                    request.drafts = request.drafts or DraftUse()
                    request.drafts.add(num_drafts, len(tokens) - 1)
                if self._draft_grants is not None:
                    self._draft_grants.note(request, num_drafts, len(tokens) - 1)
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
            if request.needs_verdict:
                stopped = self._judge(request, output, stopped, result, row)
            if request.num_placeholders:
                self._settle(request, len(output.new_token_ids))
            if stopped is not None:
                self._stop(request, output, stopped, now)
        if result.drafts:
            note_drafts(plan, rows, result.drafts)
        for on_update in self._on_update:
            on_update(plan, result)
        if result.extras:
            _attach_extras(result, rows, outputs)
        return outputs

    def _displace(self, now: float) -> None:
        """Preempt running requests for waiting ones, as the policy decides."""
        for victim in self._policy.displaced(self._queues.running, self._kv_cache):
            self._builder.plan.preempted.append(victim.request_id)
            self._preempt(victim, now)

    def _schedule_running(self, now: float) -> None:
        builder = self._builder
        has_budgets, has_feature_budgets = builder.has_budgets, builder.has_feature_budgets
        running = RequestStatus.RUNNING
        for request in self._policy.walk(self._queues.running, self._num_admissible()):
            if not builder.remaining:
                return
            # Preempted in this step.
            if request.status is not running:
                continue
            computed = request.num_computed_tokens
            num_tokens = len(request.token_ids) + request.num_placeholders - computed
            num_tokens += len(request.draft_token_ids)
            # The usual row is one pending token, not the last: only a further budget could reduce it.
            if (
                num_tokens != 1
                or computed + 2 >= request.max_num_tokens
                or has_budgets
                or (has_feature_budgets and request.num_budgets)
            ):
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
        return min(self._queues.waiting.num_ready, self._num_rows - len(self._queues.running))

    def _grant(self, request: Request, num_tokens: int) -> int:
        """How many of its pending tokens a running request can have in this step."""
        if request.num_placeholders and is_last_token_in_flight(request):
            return 0
        # The last token of a sequence is sampled and never computed.
        num_positions = self._config.max_model_len - request.samples
        num_tokens = min(self._limit(num_tokens), num_positions - request.num_computed_tokens)
        return self._builder.clip(request, num_tokens)

    def _admit_waiting(self, now: float) -> str:
        """Admit requests; returns what ended the admission, empty if each was asked."""
        queues, builder = self._queues, self._builder
        self._has_running_rows = bool(builder.rows)
        preempted = builder.plan.preempted
        candidates = queues.waiting.candidates()
        while builder.remaining and len(queues.running) < self._num_rows:
            request = next(candidates, None)
            if request is None:
                return ""
            if self._pause is PauseState.NEW and not request.block_tables:
                return PAUSED
            # A preempted request needs its tokens of steps in flight before it can continue.
            waits_for_tokens = request.resumes_after_step > self._updated_step_number
            if waits_for_tokens:
                continue
            if not builder.admits(request):
                if request.num_budgets:
                    request.refused_in_step = self._step_number
                continue
            if request.request_id in preempted:
                continue
            if limit := self._admit(request, now):
                # No request overtakes one that only has to wait for room.
                return limit
        return MAX_NUM_SEQS if builder.remaining else MAX_NUM_BATCHED_TOKENS

    def _admit(self, request: Request, now: float) -> str:
        """Admit a request; returns the limit that it does not fit into, empty if it was admitted."""
        config, kv_cache, builder = self._config, self._kv_cache, self._builder
        hit = kv_cache.match_prefix(request)
        num_computed = request.num_computed_tokens
        # Budgets depend on where a row begins, so the prefix hit counts as computed for them.
        request.num_computed_tokens = num_known = hit.num_tokens or num_computed
        wanted = request.num_tokens - num_known
        if wanted == 1 and request.samples and self._pads_newcomers and (self._has_running_rows or num_known):
            wanted += pad_with_drafts(
                request,
                config.num_speculative_tokens,
                num_known,
                max_model_len=config.max_model_len,
                max_tokens=config.max_num_batched_tokens,
            )
        wanted = self._limit(wanted)
        num_tokens = builder.clip(request, wanted)
        must_be_whole = request.draft_token_ids or not config.enable_chunked_prefill
        new_block_ids, limit = None, MAX_NUM_BATCHED_TOKENS
        if num_tokens >= 1 and not (must_be_whole and num_tokens < wanted):
            new_block_ids, limit = self._make_room(request, hit, num_tokens), FREE_BLOCKS
        if new_block_ids is None:
            if limit is FREE_BLOCKS:
                for on_not_admitted in self._on_not_admitted:
                    on_not_admitted(request)
            request.draft_token_ids, request.num_computed_tokens = [], num_computed
            return limit
        self._queues.enter(request, now)
        builder.admit(request, new_block_ids)
        builder.add_row(request, num_tokens, new_block_ids)
        self._num_chunked_prefills += not request.last_row_sampled
        return ""

    def _make_room(self, request: Request, hit: PrefixHit, num_tokens: int) -> NewBlocks | None:
        """Blocks for a request that is admitted; if none runs, also those of idle requests."""
        kv_cache, reserve_all = self._kv_cache, self._config.reserve_full_prompt
        running = self._queues.running
        new_block_ids = kv_cache.admit(request, hit, num_tokens, reserve_all=reserve_all)
        while new_block_ids is None and self._release_some(is_alone=not running, besides=request):
            new_block_ids = kv_cache.admit(request, hit, num_tokens, reserve_all=reserve_all)
        return new_block_ids

    def _limit(self, num_tokens: int) -> int:
        """`num_tokens`, capped by the limit for long prefills."""
        return min(num_tokens, self._prefill_limit) if self._prefill_limit else num_tokens

    def _grow(self, request: Request, num_tokens: int, now: float) -> NewBlocks | None:
        """Blocks for a running request, by preempting others if needed; None: it was preempted itself."""
        num_in_flight_tokens = self._in_flight.num_tokens_of(request) if self._kv_cache.gives_back else 0
        while True:
            new_block_ids = self._kv_cache.grow(request, num_tokens, num_in_flight_tokens)
            if new_block_ids is not None:
                return new_block_ids
            if self._release_some(is_alone=len(self._queues.running) == 1):
                continue
            victim = self._policy.pick_victim(self._queues.running, self._kv_cache)
            num_withdrawn_tokens = self._builder.withdraw(victim)
            self._builder.plan.preempted.append(victim.request_id)
            self._preempt(victim, now, num_withdrawn_tokens)
            if victim is request:
                return None

    def _release_some(self, *, is_alone: bool, besides: Request | None = None) -> bool:
        """Release blocks that no running request holds. False if there are none that may be released now.

        is_alone: no other request runs. besides: the waiting request that needs blocks; None: a running one.
        """
        # Idle requests give way to running ones, and to waiting ones if nothing runs.
        if (besides is None or is_alone) and self._queues.reclaim(besides):
            return True
        if any(on_pressure(besides is None) for on_pressure in self._on_pressure):
            return True
        return is_alone and any(on_exhausted() for on_exhausted in self._on_exhausted)

    def _preempt(self, request: Request, now: float, num_withdrawn_tokens: int = 0) -> None:
        request.resumes_after_step = self._in_flight.newest_of(request)
        self._queues.preempt(request, now, num_withdrawn_tokens)

    def _judge(
        self,
        request: Request,
        output: RequestOutput,
        stopped: tuple[FinishReason, int | None] | None,
        result: StepResult,
        row: int,
    ) -> tuple[FinishReason, int | None] | None:
        """The end of the request by a verdict, else by its tokens. Drops the tokens that do not count."""
        if stopped is not None:
            output.finish_reason, output.stop_token_id = stopped
        extras = {kind: by_row[row] for kind, by_row in result.extras.items() if row in by_row}
        verdict = request.verdict = verdict_of(self._features, request, output, extras)
        if verdict is None:
            return stopped
        num_new = len(output.new_token_ids)
        num_kept = num_new if verdict.num_tokens is None else verdict.num_tokens
        if num_kept < num_new:
            del request.token_ids[num_kept - num_new :]
            output.new_token_ids = output.new_token_ids[:num_kept]
            if (logprobs := result.logprobs.pop(row, None)) is not None and num_kept:
                result.logprobs[row] = logprobs.part(0, num_kept)
        output.message = verdict.message
        if verdict.code:
            output.failure = RequestFailed(verdict.code, verdict.message)
        return verdict.reason, NO_STOP_TOKEN if verdict.reason is FinishReason.STOP else None

    def _settle(self, request: Request, num_tokens: int) -> None:
        """Placeholders became tokens: register the blocks that these fill."""
        request.num_placeholders -= num_tokens
        num_settled_tokens = request.num_computed_tokens - request.num_placeholders
        if num_settled_tokens >= request.registers_at:
            self._kv_cache.commit(request, num_settled_tokens)

    def _stop(
        self, request: Request, output: RequestOutput, stopped: tuple[FinishReason, int | None], now: float
    ) -> None:
        """End a request, or its turn, whose newest token ends it."""
        output.finish_reason, output.stop_token_id = stopped
        continues = request.is_resumable or request.segments
        if not continues or output.finish_reason is FinishReason.ERROR:
            self._queues.finish(request, output.finish_reason, now)
            output.drafts = request.drafts
            return
        output.continues, output.drafts = True, request.drafts
        # What a turn has registered is computed by now: its last token is not, and fills no block of these.
        full = {block_id for table in request.block_tables for block_id in table.block_ids}
        self._in_flight.forget(request, full)
        self._queues.end_turn(request, output.finish_reason, now)
        if request.segments:
            segment = request.segments.popleft()
            self._queues.begin_turn(request, segment, self._config.max_model_len, now)


class _ForgetDrafts(SchedulerFeature):
    """Releases what a draft limit keeps of a request once it ends."""

    def __init__(self, grants: DraftGrants) -> None:
        self._grants = grants

    def on_finish(self, request: Request) -> None:
        self._grants.forget(request)


def _attach_extras(result: StepResult, rows: Sequence[Request], outputs: list[RequestOutput]) -> None:
    """Add each row's extras to its output. A row of a prompt's chunk gets an output without tokens."""
    by_id = {output.request_id: output for output in outputs}
    for kind, extras in result.extras.items():
        for row, extra in extras.items():
            request = rows[row]
            output = by_id.get(request.request_id)
            if output is None:
                if request.is_finished:
                    continue
                output = by_id[request.request_id] = RequestOutput(request.request_id, [])
                outputs.append(output)
            output.extras = (output.extras or {}) | {kind: extra}


class _CommonPrefix:
    """Counts the leading blocks that all rows of a plan share, where these are not the rows of the last plan.

    While a request runs, the entries of its block tables that attention reads stay, and blocks that it gains
    are its own.
    """

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache
        self._request_ids: list[str] = []
        self._num_blocks: list[int] = []

    def count(self, plan: StepPlan, rows: Sequence[Request]) -> list[int]:
        """See StepPlan.num_common_blocks."""
        if plan.admitted or plan.request_ids != self._request_ids:
            self._request_ids = plan.request_ids
            self._num_blocks = self._kv_cache.num_common_blocks(rows)
        return self._num_blocks
