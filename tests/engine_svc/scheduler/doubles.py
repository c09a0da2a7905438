"""Stand-ins for optional features, as the scheduler meets them: further budgets, and hooks.

Each does what the feature would make the scheduler do, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from engine_svc.cache.kv_cache import KVCache
from engine_svc.request import ContentSpan, Request
from engine_svc.step import StepPlan, StepResult


class Meter:
    """A budget without a limit that keeps book."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.spent: dict[str, int] = {}
        self.given_back: dict[str, int] = {}

    def begin_step(self) -> None:
        self.num_steps += 1
        self.spent = {}
        self.given_back = {}

    def admits(self, request: Request) -> bool:
        return True

    def clip(self, request: Request, num_tokens: int) -> int:
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        assert request.request_id not in self.spent
        self.spent[request.request_id] = num_tokens

    def give_back(self, request: Request, num_tokens: int) -> None:
        assert self.spent.pop(request.request_id) == num_tokens
        self.given_back[request.request_id] = num_tokens


class AtMost(Meter):
    """Grants each request at most so many tokens, by its id; others everything."""

    def __init__(self, limits: dict[str, int]) -> None:
        super().__init__()
        self._limits = limits

    def clip(self, request: Request, num_tokens: int) -> int:
        return min(num_tokens, self._limits.get(request.request_id, num_tokens))


class Postponed(Meter):
    """Passes over a request as often as it is told to."""

    def __init__(self, request_id: str, num_steps: int) -> None:
        super().__init__()
        self._request_id = request_id
        self.num_left = num_steps

    def admits(self, request: Request) -> bool:
        if request.request_id != self._request_id or self.num_left == 0:
            return True
        self.num_left -= 1
        return False


class AdapterCap(Meter):
    """At most so many different adapters in a step. The adapter of a request is its first extra key."""

    def __init__(self, max_adapters: int) -> None:
        super().__init__()
        self._max_adapters = max_adapters
        self._rows: Counter[str] = Counter()

    def begin_step(self) -> None:
        super().begin_step()
        self._rows.clear()

    def admits(self, request: Request) -> bool:
        """Who finds its adapter in use, or room for one more."""
        keys = request.extra_keys
        return not keys or keys[0] in self._rows or len(self._rows) < self._max_adapters

    def take(self, request: Request, num_tokens: int) -> None:
        super().take(request, num_tokens)
        self._rows.update(request.extra_keys[:1])

    def give_back(self, request: Request, num_tokens: int) -> None:
        super().give_back(request, num_tokens)
        self._rows.subtract(request.extra_keys[:1])
        self._rows += Counter()


class EncoderBudget(Meter):
    """Spans of prompts stand for items, which are encoded whole, so many tokens a step.

    What was encoded is kept by its key until all its requests have ended. Without `splits` no row may end in
    the middle of an item.
    """

    def __init__(self, max_tokens: int, *, splits: bool = True, longest_item: int = 0) -> None:
        super().__init__()
        if not splits and max_tokens < longest_item:
            raise ValueError(f"the encoder takes {max_tokens} tokens a step, an item may have {longest_item}")
        self._max_tokens = max_tokens
        self._splits = splits
        self.remaining = 0
        self.encoded: dict[str, set[Request]] = {}  # item by key, and who needs it

    def begin_step(self) -> None:
        super().begin_step()
        self.remaining = self._max_tokens

    def clip(self, request: Request, num_tokens: int) -> int:
        """Up to the first item that cannot be had in this step."""
        start, remaining = request.num_computed_tokens, self.remaining
        end = start + num_tokens
        for item in request.spans:
            if not _touches(item, start, end):
                continue
            if not self._splits and end < item.start + item.num_tokens:
                return max(0, item.start - start)
            if item.key not in self.encoded:
                remaining -= item.num_tokens
                if remaining < 0:
                    return max(0, item.start - start)
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None:
        """Encode what the row begins. Its tokens count as computed by now."""
        super().take(request, num_tokens)
        end = request.num_computed_tokens
        for item in request.spans:
            if _touches(item, end - num_tokens, end):
                if item.key not in self.encoded:
                    self.remaining -= item.num_tokens
                    assert self.remaining >= 0
                self.encoded.setdefault(item.key, set()).add(request)

    def give_back(self, request: Request, num_tokens: int) -> None:
        """What only this row wanted is not encoded."""
        super().give_back(request, num_tokens)
        end = request.num_computed_tokens
        for item in request.spans:
            if end - num_tokens <= item.start < end and self.encoded[item.key] == {request}:
                self.remaining += item.num_tokens
                del self.encoded[item.key]

    def forget(self, request: Request) -> None:
        """A request ended; items that nobody else needs are gone."""
        for key in [key for key, holders in self.encoded.items() if holders == {request}]:
            del self.encoded[key]


class Quiet:
    """A hook that hears nothing; others listen to a part."""

    def on_add(self, request: Request) -> None:
        """Nothing."""

    def on_plan(self, plan: StepPlan) -> None:
        """Nothing."""

    def on_update(self, plan: StepPlan, result: StepResult) -> None:
        """Nothing."""

    def on_withdraw(self) -> None:
        """Nothing."""

    def on_finish(self, request: Request) -> None:
        """Nothing."""


class PrefillThrottle(Quiet, Meter):
    """While it is on and somebody decodes, nobody is admitted, unless the last open step left any waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self._waiting: set[str] = set()
        self._decoding: set[str] = set()
        self._is_saturated = False

    def admits(self, request: Request) -> bool:
        return not self._defers

    def on_add(self, request: Request) -> None:
        self._waiting.add(request.request_id)

    def on_plan(self, plan: StepPlan) -> None:
        """See who entered, and whether an open step was enough for all."""
        was_open = not self._defers
        self._waiting -= {admitted.request_id for admitted in plan.admitted}
        columns = zip(plan.request_ids, plan.samples, strict=True)
        self._decoding = {request_id for request_id, samples in columns if samples}
        if was_open:
            self._is_saturated = bool(self._waiting)

    def on_finish(self, request: Request) -> None:
        self._waiting.discard(request.request_id)
        self._decoding.discard(request.request_id)

    @property
    def _defers(self) -> bool:
        return self.is_on and not self._is_saturated and bool(self._decoding)


class Compiler(Quiet):
    """Blocks who wants something compiled, until it is told that this is done."""

    NAME = "compile"

    def __init__(self, *request_ids: str) -> None:
        self._request_ids = request_ids

    def on_add(self, request: Request) -> None:
        if request.request_id in self._request_ids:
            request.blockers.add(self.NAME)


class BlockHolder(Quiet):
    """Keeps the blocks of requests that end, for as long as they are being sent."""

    def __init__(self) -> None:
        self.kv_cache: KVCache | None = None  # known only after the core was built
        self._held: list[list[int]] = []

    def on_finish(self, request: Request) -> None:
        """Take hold of its blocks before they are free."""
        assert self.kv_cache is not None
        self._held.append(self.kv_cache.hold(request))

    def let_go(self) -> None:
        assert self.kv_cache is not None
        self.kv_cache.let_go(self._held.pop(0))


class Loader(Quiet):
    """Fetches the beginning of some requests from elsewhere: they hold blocks while they are blocked."""

    NAME = "load"

    def __init__(self, num_tokens: dict[str, int]) -> None:
        self._num_tokens = num_tokens
        self.reserve: Callable[[Request, int], object] | None = None  # known only after the core was built

    def on_add(self, request: Request) -> None:
        num_tokens = self._num_tokens.get(request.request_id, 0)
        if num_tokens:
            assert self.reserve is not None
            assert self.reserve(request, num_tokens) is not None
            request.blockers.add(self.NAME)


def item(start: int, num_tokens: int, key: str = "item") -> tuple[ContentSpan, ...]:
    return (ContentSpan(start, num_tokens, key),)


def _touches(span: ContentSpan, start: int, end: int) -> bool:
    return span.start < end and span.start + span.num_tokens > start
