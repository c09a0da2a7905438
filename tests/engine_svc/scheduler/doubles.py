"""Stand-ins for optional features, as the scheduler meets them: further budgets, and their scheduler halves.

Each does what the feature would make the scheduler do, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import ContentSpan, Request
from engine_svc.loop.protocols import EngineScheduler
from engine_svc.scheduler.feature import SchedulerFeature


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
    """Passes over a request a given number of times."""

    def __init__(self, request_id: str, num_steps: int) -> None:
        super().__init__()
        self._request_id = request_id
        self.num_left = num_steps

    def admits(self, request: Request) -> bool:
        if request.request_id != self._request_id or self.num_left == 0:
            return True
        self.num_left -= 1
        return False


class Compiler(SchedulerFeature):
    """Blocks requests that want something compiled, until that is done."""

    NAME = "compile"

    def __init__(self, *request_ids: str) -> None:
        self._request_ids = request_ids

    def on_add(self, request: Request) -> None:
        if request.request_id in self._request_ids:
            request.blockers.add(self.NAME)


class BlockHolder(SchedulerFeature):
    """Keeps the blocks of requests that end, for as long as they are being sent."""

    def __init__(self) -> None:
        self.kv_cache: KVCache | None = None  # known only after the core was built
        self._held: list[list[int]] = []

    def on_finish(self, request: Request) -> None:
        """Take hold of its blocks before they are free."""
        assert self.kv_cache is not None
        self._held.append(self.kv_cache.hold(request))

    def release_held(self) -> None:
        assert self.kv_cache is not None
        self.kv_cache.release_held(self._held.pop(0))


class Loader(SchedulerFeature):
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


class Retainer(SchedulerFeature):
    """Retains the blocks of requests that end, each under its id."""

    def __init__(self) -> None:
        self.kv_cache: KVCache | None = None
        self.num_resets = 0

    def wrap(self, scheduler: EngineScheduler, kv_cache: KVCache) -> EngineScheduler:
        self.kv_cache = kv_cache
        return scheduler

    def on_finish(self, request: Request) -> None:
        assert self.kv_cache is not None
        self.kv_cache.retain(request.request_id, request, request.num_tokens)

    def on_reset(self) -> None:
        self.num_resets += 1
