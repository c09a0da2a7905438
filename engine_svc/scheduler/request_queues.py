"""All requests, waiting, blocked or running, and their transitions. Knows no steps and no budgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.errors import RequestFailed
from engine_svc.core.request import (
    NO_STOP_TOKEN,
    FinishReason,
    FirstOutput,
    InputSegment,
    PrefillStats,
    Request,
    RequestOutput,
    RequestStatus,
)
from engine_svc.core.step import BARRED
from engine_svc.scheduler.feature import SchedulerFeature, overriding
from engine_svc.scheduler.policy import Policy
from engine_svc.scheduler.turns import INPUT, begin_turn, settle_turn
from engine_svc.scheduler.waiting_queue import WaitingQueue

# More than any first part of an order key; with it, keys are exact still.
_HOLDERS_AHEAD = 2.0**50


class RequestQueues:
    """All requests that have not ended. `running` is in order of admission."""

    def __init__(
        self,
        kv_cache: KVCache,
        policy: Policy,
        features: Sequence[SchedulerFeature],
        *,
        holds_idle: bool = False,
    ) -> None:
        """holds_idle: see SchedulerConfig."""
        self._kv_cache = kv_cache
        self._policy = policy
        self._features = tuple(features)
        self._on_preempt = overriding(features, "on_preempt")
        self._holds_idle = holds_idle
        policy.attach(kv_cache)
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue(policy.ready_queue())
        self.running: list[Request] = []
        self.released: list[str] = []  # rows for the runner to free with the next plan
        self.num_preemptions = 0
        self.num_resumable = 0  # requests that take further input segments
        self.num_idle = 0  # requests that wait for an input segment
        # Requests that hold blocks without running, oldest first.
        self._holders: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Add a new request. If this raises, nothing of it is kept."""
        request.order_key = self._policy.order_key(request)
        for feature in self._features:
            feature.on_add(request)
        if not request.blockers:
            request.move_to(RequestStatus.WAITING)
        self._enqueue(request)
        self.requests[request.request_id] = request
        self.num_resumable += request.is_resumable

    def unblock(self, request: Request, name: str) -> None:
        """Remove `name` from a request's blockers; without blockers it may be admitted."""
        request.blockers.discard(name)
        if not request.blockers:
            self._depart(request)
            request.move_to(RequestStatus.WAITING)
            self._enqueue(request)

    def enter(self, request: Request, now: float) -> None:
        """Move a waiting request to the running ones."""
        self._policy.on_enter(request)
        self._depart(request)
        request.move_to(RequestStatus.RUNNING)
        self.running.append(request)
        timeline = request.timeline
        if timeline.scheduled_at is None:
            timeline.scheduled_at = now
            request.num_cached_tokens = request.num_computed_tokens
            timeline.events.append(("scheduled", now))
        else:
            timeline.events.append(("resumed", now))

    def preempt(self, request: Request, now: float, num_withdrawn_tokens: int) -> None:
        """Release a running request's blocks and queue it again; it will compute its tokens anew.

        Withdrawn tokens were planned in this step but will not be computed in it.
        """
        self._depart(request)
        self._kv_cache.release(request, num_withdrawn_tokens)
        request.move_to(RequestStatus.WAITING)
        _forget_progress(request, num_withdrawn_tokens)
        for on_preempt in self._on_preempt:
            on_preempt(request)
        request.num_preemptions += 1
        request.timeline.events.append(("preempted", now))
        request.order_key = self._policy.requeue_key(request)
        self._enqueue(request)
        self.num_preemptions += 1

    def end_turn(self, request: Request, reason: FinishReason, now: float) -> None:
        """Let a request wait for its next input segment; it keeps its blocks."""
        self._depart(request)
        request.finish_reason = reason
        request.timeline.finished_at = now
        for feature in self._features:
            feature.on_turn_end(request)
        num_computed_tokens = request.num_computed_tokens
        settle_turn(request, self._kv_cache.hasher.block_size)
        if request.num_computed_tokens < num_computed_tokens and not self._kv_cache.truncates:
            # The next turn goes on where a state is kept.
            self._kv_cache.release(request)
            _forget_progress(request)
        request.blockers.add(INPUT)
        request.move_to(RequestStatus.BLOCKED)
        if self._holds_idle:
            # Before all that hold no blocks, which could wait for these forever.
            first, second, last = self._policy.order_key(request)
            request.order_key = (first - _HOLDERS_AHEAD, second, last)
        else:
            request.order_key = self._policy.requeue_key(request)
        self.num_idle += 1
        self._enqueue(request)

    def begin_turn(self, request: Request, segment: InputSegment, max_model_len: int, now: float) -> None:
        """Let a request that waits for its next input segment go on with it.

        If this raises, the request is blocked by nothing, and has to be ended.
        """
        begin_turn(request, segment, max_model_len, now)
        request.blockers.discard(INPUT)
        self.num_idle -= 1
        for feature in self._features:
            feature.on_turn_begin(request)
        self.unblock(request, INPUT)

    @property
    def has_ready_holder(self) -> bool:
        """Whether a request that holds blocks may be admitted."""
        return any(request.status is RequestStatus.WAITING for request in self._holders.values())

    def reclaim(self, besides: Request | None = None) -> bool:
        """Release the blocks of the request that has been idle longest; False if there is none.

        Only of requests that wait for an input segment: with other blockers KV may be arriving in the blocks.
        """
        if self._holds_idle:
            return False
        for request in self._holders.values():
            if request is not besides and request.blockers <= {INPUT}:
                self._depart(request)
                self._kv_cache.release(request)
                _forget_progress(request)
                self._enqueue(request)
                return True
        return False

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a request in any status: its blocks are free at once, its row with the next plan."""
        self._depart(request)
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        request.timeline.finished_at = now
        del self.requests[request.request_id]
        self.num_resumable -= request.is_resumable
        self.num_idle -= INPUT in request.blockers
        # Hooks first, as one that still needs the blocks holds them.
        for feature in self._features:
            feature.on_finish(request)
        # KV of a request that failed may be wrong as well: no later request may hit it.
        is_broken = reason is FinishReason.ERROR
        self._kv_cache.release(request, request.num_computed_tokens if is_broken else 0)

    def end_early(self, request: Request, reason: FinishReason, now: float) -> RequestOutput:
        """End a request before its last token; returns its final output."""
        self.finish(request, reason, now)
        output = RequestOutput(request.request_id, [], reason, drafts=request.drafts)
        if request.timeline.first_token_at is None:
            output.first = FirstOutput(request.num_cached_tokens)
        return output

    def end_computed(self, request: Request, now: float) -> RequestOutput:
        """End a request that samples no token and whose prompt is computed; returns its final output."""
        output = self.end_early(request, FinishReason.STOP, now)
        output.stop_token_id = NO_STOP_TOKEN
        return output

    def end_broken(
        self, request: Request, message: str, now: float, *, is_barred: bool = False
    ) -> RequestOutput:
        """End a request that has no next token, with a message for the client.

        is_barred: whether its own rules leave none.
        """
        output = self.end_early(request, FinishReason.ERROR, now)
        named = f": {', '.join(request.rules)}" if message is BARRED and request.rules else ""
        output.message = message + named
        if is_barred and request.rules:
            output.failure = RequestFailed("", output.message, rules=tuple(request.rules))
        return output

    def release_again(self, request_ids: Iterable[str]) -> None:
        """Free these rows with the next plan too, as the plan that was to free them may not have run.

        Runners ignore rows that they do not have.
        """
        self.released = list(dict.fromkeys((*request_ids, *self.released)))

    def _depart(self, request: Request) -> None:
        """Remove a request from the queue of its status."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._policy.on_leave(request)
            self.released.append(request.request_id)
            return
        self.waiting.remove(request)
        self._holders.pop(request.request_id, None)

    def _enqueue(self, request: Request) -> None:
        num_known = request.num_computed_tokens or self._kv_cache.match_prefix(request).num_tokens
        request.num_uncached_tokens = request.num_tokens - num_known
        if request.block_tables:
            self._holders[request.request_id] = request
        self.waiting.add(request)


def note_first_token(request: Request, output: RequestOutput, now: float) -> None:
    """Stamp the first token of a request, before it is appended, and report its prompt with it."""
    timeline = request.timeline
    timeline.first_token_at = now
    timeline.events.append(("first_token", now))
    scheduled_at = now if timeline.scheduled_at is None else timeline.scheduled_at
    prefill = PrefillStats(
        num_prompt_tokens=request.num_tokens,
        num_chunks=request.num_chunks + 1,
        queue_s=scheduled_at - timeline.queued_at,
        prefill_s=now - scheduled_at,
    )
    output.first = FirstOutput(request.num_cached_tokens, prefill)


def _forget_progress(request: Request, num_withdrawn_tokens: int = 0) -> None:
    num_computed_tokens = request.num_computed_tokens - num_withdrawn_tokens
    request.num_lost_tokens = max(request.num_lost_tokens, num_computed_tokens)
    request.num_computed_tokens = 0
    request.num_placeholders = 0
    request.draft_token_ids = []
