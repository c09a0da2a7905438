"""Stand-ins for who follows the cache: listeners to its events, hooks that hold blocks or encoded items."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_svc.cache.kv_cache import KVCache
from engine_svc.cache.observer import StoredBlocks
from engine_svc.request import ContentSpan, Request
from engine_svc.step import StepPlan, StepResult


class EventLog:
    """Writes down what the cache tells, in its order; that nothing was handed out or shared is no news."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def take(self) -> list[tuple[object, ...]]:
        events, self.events = self.events, []
        return events

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self.events.append(("allocate", list(block_ids)))

    def on_hold(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self.events.append(("hold", list(block_ids)))

    def on_store(self, stored: StoredBlocks) -> None:
        self.events.append(("store", stored))

    def on_evict(self, block_id: int, block_hash: bytes, group: int) -> None:
        self.events.append(("evict", block_id, block_hash, group))

    def on_clear(self) -> None:
        self.events.append(("clear",))


@dataclass(frozen=True, slots=True)
class Residence:
    """How long findable content stayed in a block, and how it was used."""

    lifetime_s: float  # from when the block was handed out to its eviction
    idle_s: float  # from the last use to its eviction
    reuse_gaps_s: tuple[float, ...]  # between the last uses


class Residency:
    """Measures the stay of content in a sample of the blocks; of each the last four uses are remembered."""

    MAX_USES = 4

    def __init__(self, clock: Callable[[], float], share: float = 1.0, seed: int = 0) -> None:
        self._clock = clock
        self._share = share
        self._random = random.Random(seed)
        self._begun_at: dict[int, float] = {}
        self._used_at: dict[int, deque[float]] = {}
        self.ended: list[Residence] = []

    @property
    def num_sampled(self) -> int:
        return len(self._begun_at)

    def on_allocate(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._begun_at.pop(block_id, None)
            if self._random.random() < self._share:
                self._begun_at[block_id] = self._clock()
                self._used_at[block_id] = deque(maxlen=self.MAX_USES)

    def on_hold(self, block_ids: Sequence[int]) -> None:
        for block_id in self._begun_at.keys() & set(block_ids):
            self._used_at[block_id].append(self._clock())

    def on_store(self, stored: StoredBlocks) -> None:
        """Nothing: a stay begins with the block."""

    def on_evict(self, block_id: int, block_hash: bytes, group: int) -> None:
        begun_at = self._begun_at.pop(block_id, None)
        if begun_at is not None:
            now, uses = self._clock(), self._used_at.pop(block_id)
            gaps = tuple(later - earlier for earlier, later in itertools.pairwise(uses))
            self.ended.append(Residence(now - begun_at, now - max((begun_at, *uses)), gaps))

    def on_clear(self) -> None:
        self._begun_at.clear()


class Sender:
    """Holds the blocks of a request that ends until every step that was planned before has come back."""

    def __init__(self) -> None:
        self.kv_cache: KVCache | None = None  # known only after the core was built
        self._newest_step = 0
        self._updated_step = 0
        self.held: list[tuple[int, list[int]]] = []  # the last step that may still write, and the blocks

    def on_add(self, request: Request) -> None:
        """Nothing."""

    def on_plan(self, plan: StepPlan) -> None:
        self._newest_step = plan.step_number

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        """A step came back: let go of what only it could write to."""
        self._updated_step = plan.step_number
        while self.held and self.held[0][0] <= self._updated_step:
            assert self.kv_cache is not None
            self.kv_cache.let_go(self.held.pop(0)[1])

    def on_withdraw(self) -> None:
        """Nothing: what is planned later has greater numbers."""

    def on_finish(self, request: Request) -> None:
        """Take hold of the blocks before they are free."""
        assert self.kv_cache is not None
        self.held.append((self._newest_step, self.kv_cache.hold(request)))


class EncoderCache:
    """Items that stand behind spans of prompts, encoded once and kept: so many tokens in all, so many a step.

    An item that no request needs any more can be used again until its room is wanted. As a budget it clips a
    row before the first item that cannot be had in this step; as a hook it learns who ended.
    """

    def __init__(self, max_tokens: int, max_tokens_per_step: int) -> None:
        self._max_tokens_per_step = max_tokens_per_step
        self._num_step_tokens = max_tokens_per_step
        self.num_free_tokens = max_tokens  # that hold nothing
        self.num_reclaimable_tokens = max_tokens  # the same, and what nobody needs
        self._holders: dict[str, set[str]] = {}  # item by key, and the requests that need it
        self._unneeded: OrderedDict[str, int] = OrderedDict()  # sizes, the oldest first
        self._encoded_for: dict[str, str] = {}  # what is encoded in this step, and the row that began it
        self._evicted: list[str] = []

    @property
    def keys(self) -> set[str]:
        return set(self._holders)

    def take_evicted(self) -> list[str]:
        """Items that had to go since the last time, for whoever holds what they became."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def begin_step(self) -> None:
        self._num_step_tokens = self._max_tokens_per_step
        self._encoded_for.clear()

    def admits(self, request: Request) -> bool:
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        """Up to the first item that cannot be had in this step."""
        start = request.num_computed_tokens
        num_step_tokens, num_reclaimable = self._num_step_tokens, self.num_reclaimable_tokens
        wanted: set[str] = set()
        for item in _items(request, start, start + num_tokens):
            if item.key in wanted:
                continue
            wanted.add(item.key)
            if item.key in self._holders:
                # What it holds on to cannot make room for others.
                num_reclaimable -= self._unneeded.get(item.key, 0)
                continue
            if item.num_tokens > min(num_step_tokens, num_reclaimable):
                return max(0, item.start - start)
            num_step_tokens -= item.num_tokens
            num_reclaimable -= item.num_tokens
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        """Hold what the row needs, encoding what is not there. Its tokens count as computed by now."""
        end = request.num_computed_tokens
        items = list(_items(request, end - num_tokens, end))
        # First what is there, so that nothing of it makes room for the rest.
        for item in items:
            if item.key in self._holders:
                self.num_reclaimable_tokens -= self._unneeded.pop(item.key, 0)
                self._holders[item.key].add(request.request_id)
        for item in items:
            if item.key not in self._holders:
                self._encode(item)
                self._holders[item.key] = {request.request_id}
                self._encoded_for[item.key] = request.request_id

    def give_back(self, request: Request, num_tokens: int) -> None:
        """What was to be encoded for this row alone is not."""
        end = request.num_computed_tokens
        for item in _items(request, end - num_tokens, end):
            if self._encoded_for.get(item.key) == request.request_id and len(self._holders[item.key]) == 1:
                del self._holders[item.key], self._encoded_for[item.key]
                self._num_step_tokens += item.num_tokens
                self.num_reclaimable_tokens += item.num_tokens
                self.num_free_tokens += item.num_tokens

    def on_add(self, request: Request) -> None:
        """Nothing."""

    def on_plan(self, plan: StepPlan) -> None:
        plan.extras[EncoderCache] = self.take_evicted()

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        """Nothing."""

    def on_withdraw(self) -> None:
        """Nothing."""

    def on_finish(self, request: Request) -> None:
        """Its items are kept, as long as nobody wants their room."""
        for item in request.spans:
            holders = self._holders.get(item.key, set())
            if request.request_id in holders:
                holders.remove(request.request_id)
                if not holders:
                    self._unneeded[item.key] = item.num_tokens
                    self.num_reclaimable_tokens += item.num_tokens

    def _encode(self, item: ContentSpan) -> None:
        self._num_step_tokens -= item.num_tokens
        self.num_reclaimable_tokens -= item.num_tokens
        while self.num_free_tokens < item.num_tokens:
            key, num_tokens = self._unneeded.popitem(last=False)
            del self._holders[key]
            self._evicted.append(key)
            self.num_free_tokens += num_tokens
        self.num_free_tokens -= item.num_tokens


def _items(request: Request, start: int, end: int) -> list[ContentSpan]:
    return [span for span in request.spans if span.start < end and span.start + span.num_tokens > start]
