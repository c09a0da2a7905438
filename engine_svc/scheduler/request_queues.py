"""Where every request is: waiting, blocked, running; and its moves. Knows no steps and no budgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import FinishReason, Request, RequestOutput, RequestStatus
from engine_svc.scheduler.hook import SchedulerHook
from engine_svc.scheduler.policy import Policy
from engine_svc.scheduler.turns import INPUT
from engine_svc.scheduler.waiting_queue import WaitingQueue


class RequestQueues:
    """All requests that have not ended. `running` is in order of admission."""

    def __init__(self, kv_cache: KVCache, policy: Policy, hooks: Sequence[SchedulerHook]) -> None:
        self._kv_cache = kv_cache
        self._policy = policy
        self._hooks = tuple(hooks)
        self.requests: dict[str, Request] = {}
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.released: list[str] = []  # rows for the runner to free with the next plan
        self.num_preemptions = 0
        # Requests that hold blocks without running, oldest first.
        self._holders: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """Enter a new request. Where this raises, nothing of it is kept."""
        request.order_key = self._policy.order_key(request)
        for hook in self._hooks:
            hook.on_add(request)
        if not request.blockers:
            request.move_to(RequestStatus.WAITING)
        self._enqueue(request)
        self.requests[request.request_id] = request

    def unblock(self, request: Request, name: str) -> None:
        """Take `name` off what blocks a request; without any it may be admitted."""
        request.blockers.discard(name)
        if not request.blockers:
            self._depart(request)
            request.move_to(RequestStatus.WAITING)
            self._enqueue(request)

    def enter(self, request: Request, now: float) -> None:
        """Move a waiting request among the running."""
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
        """Take a running request's blocks and queue it again; it will compute its tokens anew.

        Withdrawn tokens were planned in this step, and will not be computed in it after all.
        """
        self._depart(request)
        self._kv_cache.release(request, num_withdrawn_tokens)
        request.move_to(RequestStatus.WAITING)
        _forget_progress(request)
        request.num_preemptions += 1
        request.timeline.events.append(("preempted", now))
        request.order_key = self._policy.requeue_key(request)
        self._enqueue(request)
        self.num_preemptions += 1

    def end_turn(self, request: Request) -> None:
        """Let a request keep the blocks it has and wait for its next chunk."""
        self._depart(request)
        request.blockers.add(INPUT)
        request.move_to(RequestStatus.BLOCKED)
        request.order_key = self._policy.requeue_key(request)
        self._enqueue(request)

    def reclaim(self, besides: Request | None = None) -> bool:
        """Take the blocks of the request that has been idle for the longest; False where there is none.

        Not of one that waits for anything but its next chunk: its KV may be on its way into the blocks.
        """
        for request in self._holders.values():
            if request is not besides and request.blockers <= {INPUT}:
                self._depart(request)
                self._kv_cache.release(request)
                _forget_progress(request)
                self._enqueue(request)
                return True
        return False

    def finish(self, request: Request, reason: FinishReason, now: float) -> None:
        """End a request wherever it is: its blocks are free at once, its row with the next plan."""
        self._depart(request)
        request.move_to(RequestStatus.FINISHED)
        request.finish_reason = reason
        request.timeline.finished_at = now
        del self.requests[request.request_id]
        # Hooks first: who still needs the blocks takes hold of them.
        for hook in self._hooks:
            hook.on_finish(request)
        # What a broken request computed may be broken as well: nobody shall hit it.
        is_broken = reason is FinishReason.ERROR
        self._kv_cache.release(request, request.num_computed_tokens if is_broken else 0)

    def end_early(self, request: Request, reason: FinishReason, now: float) -> RequestOutput:
        """End a request before its last token; returns its last output."""
        self.finish(request, reason, now)
        output = RequestOutput(request.request_id, [], reason)
        if request.timeline.first_token_at is None:
            output.num_cached_tokens = request.num_cached_tokens
        return output

    def end_broken(self, request: Request, message: str, now: float) -> RequestOutput:
        """End a request that has no next token; the message says why."""
        output = self.end_early(request, FinishReason.ERROR, now)
        output.message = message
        return output

    def release_again(self, request_ids: Iterable[str]) -> None:
        """Free these rows with the next plan, as it is not known whether the plan that said so was run.

        Who runs plans passes over rows that it does not have.
        """
        self.released = list(dict.fromkeys((*request_ids, *self.released)))

    def _depart(self, request: Request) -> None:
        """Take a request out of where its status says it is."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
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
    """Stamp the first token of a request, and tell with it what came from the prefix cache."""
    request.timeline.first_token_at = now
    request.timeline.events.append(("first_token", now))
    output.num_cached_tokens = request.num_cached_tokens


def _forget_progress(request: Request) -> None:
    request.num_computed_tokens = 0
    request.num_placeholders = 0
    request.draft_token_ids = []
