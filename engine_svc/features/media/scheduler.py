"""How many embeddings the encoder computes in a step, and which of its outputs are kept.

An item is encoded as a whole in the first step that computes one of its positions. Where that does not fit
into the step or the cache, the chunk ends before the item.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine_svc.config import EngineConfig
from engine_svc.core.encoder_spec import read_encoder_spec
from engine_svc.core.request import ContentSpan, Request
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.features.media.extras import KEY_PREFIX, EncoderWork, MediaItems, RowItems
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature


def make(config: EngineConfig, context: SchedulerContext) -> SchedulerFeature | None:
    options = replay_options(config)
    return None if options is None else replayed(options)


def replay_options(config: EngineConfig) -> dict[str, int] | None:
    if read_encoder_spec(Path(config.model)) is None:
        return None
    return {
        "max_outputs": config.max_encoder_outputs,
        "max_kept": config.max_kept_outputs,
        "divides": int(not config.disable_chunked_mm_input),
        "num_ahead": 0,
    }


def replayed(options: Mapping[str, int]) -> EncoderSteps:
    """max_outputs: in a step.  max_kept: in the cache.  divides, num_ahead: see EncoderBudget."""
    cache = EncoderCache(options["max_kept"])
    budget = EncoderBudget(
        options["max_outputs"], cache, divides=bool(options["divides"]), num_ahead=options["num_ahead"]
    )
    return EncoderSteps(budget, cache)


class EncoderCache:
    """The encoder's outputs by key, counted in embeddings. Knows no tensors.

    An output that no request holds stays until room is needed; the one released first is evicted first.
    """

    def __init__(self, max_outputs: int) -> None:
        self._max_outputs = max_outputs
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, set[Request]] = {}  # of each output; none of those below
        self._unheld: OrderedDict[str, int] = OrderedDict()  # with their sizes
        self.num_free = max_outputs
        self.num_reclaimable = max_outputs  # free ones, and those of outputs without a holder
        self.evicted: list[str] = []  # keys that ranks have to drop, since the last plan that named some

    def size_of(self, key: str) -> int | None:
        """None: there is no such output."""
        return self._sizes.get(key)

    def hold(self, request: Request, key: str) -> bool:
        """Let a request hold an output. False: there is none."""
        holders = self._holders.get(key)
        if holders is None:
            return False
        if not holders:
            self.num_reclaimable -= self._unheld.pop(key)
        holders.add(request)
        return True

    def make_room(self, num_outputs: int) -> bool:
        """Evict outputs without a holder until `num_outputs` are free. False, without any change: too few."""
        if num_outputs > self.num_reclaimable:
            return False
        while num_outputs > self.num_free:
            key, size = self._unheld.popitem(last=False)
            del self._holders[key], self._sizes[key]
            self.num_free += size
            self.evicted.append(key)
        return True

    def put(self, request: Request, key: str, num_outputs: int) -> None:
        """Keep a new output, for which there is room, and let a request hold it."""
        assert key not in self._sizes, "an output that is kept is not encoded again"
        assert num_outputs <= self.num_free, "room is made before an item is encoded"
        self._sizes[key] = num_outputs
        self._holders[key] = {request}
        self.num_free -= num_outputs
        self.num_reclaimable -= num_outputs
        if key in self.evicted:
            self.evicted.remove(key)

    def release(self, request: Request, key: str) -> None:
        """End a hold. The output may have been dropped."""
        holders = self._holders.get(key)
        if not holders or request not in holders:
            return
        holders.remove(request)
        if not holders:
            size = self._unheld[key] = self._sizes[key]
            self.num_reclaimable += size

    def drop(self, key: str) -> None:
        """Forget an output that may not exist, also one that requests hold."""
        size = self._sizes.pop(key, None)
        if size is None:
            return
        if self._unheld.pop(key, None) is None:
            self.num_reclaimable += size
        del self._holders[key]
        self.num_free += size
        self.evicted.append(key)

    def clear(self) -> None:
        """Forget all outputs, those that are held as well."""
        self.evicted += self._sizes
        self._sizes.clear()
        self._holders.clear()
        self._unheld.clear()
        self.num_free = self.num_reclaimable = self._max_outputs


@dataclass(frozen=True, slots=True)
class _Item:
    """One item of a prompt. tokens: positions in it that have a token and no embedding, ascending."""

    start: int
    end: int
    key: str
    tokens: tuple[int, ...]

    @property
    def num_outputs(self) -> int:
        return self.end - self.start - len(self.tokens)

    def has_outputs_in(self, start: int, end: int) -> bool:
        first, last = max(start, self.start), min(end, self.end)
        num_tokens = bisect_left(self.tokens, last) - bisect_left(self.tokens, first)
        return last - first > num_tokens


@dataclass(slots=True)
class _Prompt:
    """The items of a request, in order. held: the keys that it holds, each with the last item that needed it.

    is_ahead: whether it has an item that is not computed yet, and so spends the budget.
    """

    items: tuple[_Item, ...]
    held: dict[str, int] = field(default_factory=dict)
    is_ahead: bool = False

    def end_of(self, key: str) -> int:
        """Until which position it holds a key."""
        return self.items[self.held[key]].end


@dataclass(slots=True)
class _Attempt:
    """The items that a row needs encoded, if the request gets it. last: the last item of each key."""

    request: Request
    start: int
    items: list[tuple[int, _Item]] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)


class EncoderBudget:
    """A budget of embeddings that the encoder computes in a step, and of those that are kept.

    Asked for requests with an item that is not computed yet.
    """

    def __init__(self, max_outputs: int, cache: EncoderCache, *, divides: bool, num_ahead: int) -> None:
        """divides: whether a chunk may end inside of an item that it does not begin with.

        num_ahead: how many tokens after a row a draft network reads.
        """
        self._max_outputs = max_outputs
        self._cache = cache
        self._divides = divides
        self._num_ahead = num_ahead
        self._remaining = 0
        self._attempt: _Attempt | None = None
        self._prompts: dict[Request, _Prompt] = {}  # of requests with items that have not ended
        self.work: dict[Request, list[tuple[int, _Item]]] = {}  # what is encoded in this step
        self.conflicts: set[str] = set()  # requests with an item whose key another size of item has

    def add(self, request: Request) -> None:
        items = tuple(_item(span) for span in request.spans if span.key.startswith(KEY_PREFIX))
        if items:
            prompt = self._prompts[request] = _Prompt(items)
            self._note_ahead(request, prompt)

    def remove(self, request: Request) -> None:
        if (prompt := self._prompts.pop(request, None)) is None:
            return
        self._release(request, prompt)
        request.num_budgets -= prompt.is_ahead

    def preempt(self, request: Request) -> None:
        """All of its tokens are computed anew. What it held stays as long as there is room."""
        if (prompt := self._prompts.get(request)) is not None:
            self._release(request, prompt)
            self._note_ahead(request, prompt)

    def pass_items(self, request: Request) -> None:
        """Release the items whose tokens are computed, but for those of steps whose tokens are awaited."""
        prompt = self._prompts.get(request)
        if prompt is None or not prompt.is_ahead:
            return
        num_computed = request.num_computed_tokens - request.num_placeholders - self._num_ahead
        for key in sorted(prompt.held, key=prompt.end_of):
            if prompt.end_of(key) <= num_computed:
                self._cache.release(request, key)
                del prompt.held[key]
        if prompt.items[-1].end <= num_computed:
            prompt.is_ahead = False
            request.num_budgets -= 1

    def begin_step(self) -> None:
        self._remaining = self._max_outputs
        self._attempt = None
        self.work.clear()

    def admits(self, request: Request) -> bool:
        """All: one whose next item cannot be encoded now ends the admission."""
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        """Up to the first item that cannot be encoded. Outputs that the row needs are held from now on."""
        self._attempt = None
        prompt = self._prompts.get(request)
        if prompt is None or num_tokens < 1:
            return num_tokens
        start, cache = request.num_computed_tokens, self._cache
        attempt = _Attempt(request, start)
        num_outputs = 0
        for index, item in enumerate(prompt.items):
            if item.start >= start + num_tokens + self._num_ahead:
                break
            if item.end <= start:
                continue
            before = max(0, item.start - start - self._num_ahead)
            if not self._divides and start < item.start and start + num_tokens < item.end:
                num_tokens = before
                break
            if item.key in attempt.last:
                attempt.last[item.key] = index
                continue
            if cache.size_of(item.key) not in (None, item.num_outputs):
                self.conflicts.add(request.request_id)
                return 0
            if cache.hold(request, item.key):
                prompt.held[item.key] = index
                continue
            fits = num_outputs + item.num_outputs <= self._remaining
            if not fits or not cache.make_room(num_outputs + item.num_outputs):
                num_tokens = before
                break
            if item.has_outputs_in(start, start + num_tokens + self._num_ahead):
                num_outputs += item.num_outputs
                attempt.items.append((index, item))
                attempt.last[item.key] = index
        self._attempt = attempt
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is None or attempt.request is not request:
            return
        end = attempt.start + num_tokens + self._num_ahead
        items = [(index, item) for index, item in attempt.items if item.start < end]
        for _, item in items:
            self._cache.put(request, item.key, item.num_outputs)
            self._prompts[request].held[item.key] = attempt.last[item.key]
            self._remaining -= item.num_outputs
        if items:
            self.work[request] = items

    def give_back(self, request: Request, num_tokens: int) -> None:
        """Its outputs stay: the ranks encode what they lack once another row needs it."""
        self._remaining += sum(item.num_outputs for _, item in self.work.pop(request, ()))

    def _note_ahead(self, request: Request, prompt: _Prompt) -> None:
        request.num_budgets += not prompt.is_ahead
        prompt.is_ahead = True

    def _release(self, request: Request, prompt: _Prompt) -> None:
        for key in sorted(prompt.held, key=prompt.end_of):
            self._cache.release(request, key)
        prompt.held.clear()


class EncoderSteps(SchedulerFeature):
    """Tells the ranks what to encode in a step, and which outputs to drop."""

    def __init__(self, budget: EncoderBudget, cache: EncoderCache) -> None:
        self.budget: EncoderBudget = budget
        self.cache = cache
        self._requests: dict[str, Request] = {}  # with items, that have not ended
        self._entered_in: dict[str, int] = {}  # the step in which each of these was admitted last
        self._items: dict[str, MediaItems] = {}  # of resumable requests, of all turns so far
        # Of steps in flight, the outputs that they make.
        self._in_flight: deque[tuple[int, list[str]]] = deque()

    def on_add(self, request: Request) -> None:
        if request.spans:
            self.budget.add(request)
            self._requests[request.request_id] = request

    def on_turn_end(self, request: Request) -> None:
        if (items := request.extras.get(MediaItems)) is not None:
            self._items[request.request_id] = items
        self._forget(request)

    def on_turn_begin(self, request: Request) -> None:
        """The ranks get the items of all turns: tokens may be computed anew, from the first on."""
        earlier: MediaItems = self._items.get(request.request_id, MediaItems(()))
        added: MediaItems = request.extras.get(MediaItems, MediaItems(()))
        items = (*earlier.items, *added.items)
        if items:
            # A replay knows the spans alone.
            starts = [span.start for span in request.spans if span.key.startswith(KEY_PREFIX)]
            moved = [replace(item, start=start) for item, start in zip(items, starts, strict=True)]
            request.extras[MediaItems] = MediaItems(tuple(moved))
        self.on_add(request)

    def on_finish(self, request: Request) -> None:
        self._items.pop(request.request_id, None)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        if self._requests.pop(request.request_id, None) is not None:
            self._entered_in.pop(request.request_id, None)
            self.budget.remove(request)

    def on_not_admitted(self, request: Request) -> None:
        if request.request_id in self._requests:
            self.budget.preempt(request)

    def on_preempt(self, request: Request) -> None:
        if request.request_id in self._requests:
            self.budget.preempt(request)

    def on_plan(self, plan: StepPlan) -> None:
        if self._requests:
            for admitted in plan.admitted:
                if admitted.request_id in self._requests:
                    self._entered_in[admitted.request_id] = plan.step_number
        work = self.budget.work
        if not work:
            return
        evicted, self.cache.evicted = self.cache.evicted, []
        plan.extras[EncoderWork] = EncoderWork(
            tuple(
                RowItems(request.request_id, tuple(index for index, _ in items))
                for request, items in work.items()
            ),
            tuple(evicted),
        )
        keys = [item.key for items in work.values() for _, item in items]
        self._in_flight.append((plan.step_number, keys))

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        if self._in_flight and self._in_flight[0][0] == plan.step_number:
            self._in_flight.popleft()
        if not self._requests:
            return
        for request_id in plan.request_ids:
            request = self._requests.get(request_id)
            # Of a step before a reset of the prefix cache, tokens of a request that began anew do not count.
            if request is not None and plan.step_number >= self._entered_in.get(request_id, 0):
                self.budget.pass_items(request)

    def on_withdraw(self) -> None:
        for _, keys in self._in_flight:
            for key in keys:
                self.cache.drop(key)
        self._in_flight.clear()


def _item(span: ContentSpan) -> _Item:
    tokens = tuple(span.start + offset for offset in span.tokens)
    return _Item(span.start, span.start + span.num_tokens, span.key, tokens)
