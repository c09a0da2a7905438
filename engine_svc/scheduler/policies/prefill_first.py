"""The policy `prefill-first`: prompts before decodes, up to a share of the step. Knows no blocks."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.policies.fcfs import FirstComeFirstServed
from engine_svc.scheduler.policy import OrderKey, Policy


class PrefillFirst(Policy):
    """First come, first served, but a step serves running prompts before decodes.

    While there are both, or a request could be admitted, prompts have `prefill_share` of the tokens of a step
    and decodes the rest, so that new requests begin soon. Decodes that do not all fit take turns.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        if not config.enable_chunked_prefill:
            raise ValueError("policy prefill-first needs chunked prefill: prompts have only a part of a step")
        self._order = FirstComeFirstServed(config)
        self._share = _PrefillShare(config)
        self._num_turns = 0  # of decodes that did not all fit
        self.budgets = (self._share,)

    def order_key(self, request: Request) -> OrderKey:
        return self._order.order_key(request)

    def requeue_key(self, request: Request) -> OrderKey:
        return self._order.requeue_key(request)

    def walk(self, running: Sequence[Request], num_waiting: int) -> Sequence[Request]:
        """First requests that are still in their prompts, then the others, each in order of admission."""
        prefills = [request for request in running if not request.last_row_sampled]
        decodes = [request for request in running if request.last_row_sampled]
        is_shared = bool(decodes) and bool(prefills or num_waiting)
        self._share.divide(decodes, is_shared=is_shared)
        if is_shared and len(decodes) > self._share.num_decode_tokens:
            first = self._num_turns * self._share.num_decode_tokens % len(decodes)
            self._num_turns += 1
            decodes = decodes[first:] + decodes[:first]
        return prefills + decodes

    def pick_victim(self, running: Sequence[Request], kv_cache: KVCache) -> Request:
        """The last admitted. It may already be in the plan."""
        return self._order.pick_victim(running, kv_cache)


class _PrefillShare:
    """The tokens of a step, divided between prompts and decodes."""

    def __init__(self, config: SchedulerConfig) -> None:
        budget = config.max_num_batched_tokens
        # A new request that is padded with drafts has to fit, and one token is left for decodes.
        min_prefill = 1 + config.num_speculative_tokens
        self._prefill_tokens = min(max(int(budget * config.prefill_share), min_prefill), budget - 1)
        self.num_decode_tokens = budget - self._prefill_tokens
        self._decodes: set[Request] = set()
        self._is_shared = False
        self._left = {True: 0, False: 0}  # by whether it is for decodes

    def divide(self, decodes: Sequence[Request], *, is_shared: bool) -> None:
        """Set which requests decode in this step, and whether tokens are divided."""
        self._decodes = set(decodes)
        self._is_shared = is_shared
        self._left = {True: self.num_decode_tokens, False: self._prefill_tokens}

    def begin_step(self) -> None:
        """Nothing: `divide` is called once it is known which requests run."""

    def admits(self, request: Request) -> bool:
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        return min(num_tokens, self._left[request in self._decodes]) if self._is_shared else num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        self._left[request in self._decodes] -= num_tokens

    def give_back(self, request: Request, num_tokens: int) -> None:
        self._left[request in self._decodes] += num_tokens
