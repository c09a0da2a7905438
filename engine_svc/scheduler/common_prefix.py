"""Counts the leading blocks that all rows of a plan share, for the runner. Knows no tokens and no budgets."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan


class CommonPrefix:
    """Counts again only where the rows of a plan are not those of the last one.

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
