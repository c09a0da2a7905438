"""What optional features do to blocks: hold them after a request's end, fill them before it begins."""

from __future__ import annotations

from engine_svc.cache.kv_cache import KVCache
from engine_svc.cache.observer import CacheObserver
from engine_svc.core.request import Request
from engine_svc.scheduler.feature import SchedulerFeature

REMOTE = "remote"


class HeldBlocks(SchedulerFeature):
    """Holds blocks of some requests after their end, and has KV of some from elsewhere."""

    def __init__(self, observer: CacheObserver) -> None:
        self.cache_observer = observer
        self.kv_cache: KVCache | None = None  # known only after the core was built
        self.sends: set[str] = set()  # requests whose blocks are sent somewhere at their end
        self.loads: dict[str, int] = {}  # requests with so many tokens elsewhere
        self.held: list[list[int]] = []  # blocks of ended requests that are still being sent
        self.loading: dict[str, Request] = {}

    @property
    def is_busy(self) -> bool:
        """Whether blocks are held that cannot be released."""
        return bool(self.held or self.loading)

    def on_add(self, request: Request) -> None:
        """Reserve room for what is elsewhere, if there is any."""
        num_tokens = self.loads.pop(request.request_id, 0)
        if not num_tokens or self.kv_cache is None:
            return
        if num_tokens <= self.kv_cache.match_prefix(request).num_tokens:
            return
        if self.kv_cache.reserve(request, num_tokens) is not None:
            request.blockers.add(REMOTE)
            self.loading[request.request_id] = request

    def on_finish(self, request: Request) -> None:
        """Take hold of blocks that are sent; forget what is no longer awaited."""
        if self.loading.get(request.request_id) is request:
            del self.loading[request.request_id]
        is_sent = request.request_id in self.sends
        self.sends.discard(request.request_id)
        if is_sent and request.block_tables and self.kv_cache is not None:
            self.held.append(self.kv_cache.hold(request))

    def release_held(self) -> None:
        if self.held and self.kv_cache is not None:
            self.kv_cache.release_held(self.held.pop(0))
