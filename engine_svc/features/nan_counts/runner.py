"""Counts the logits of each row that are not finite, before anything excludes tokens by minus infinity."""

from __future__ import annotations

from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.nan_counts.extras import NanCount
from engine_svc.runner.feature import LogitRows, PendingPart, RunnerContext, RunnerFeature
from engine_svc.runner.sampling.transfer import Ints, to_host


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature | None:
    return NanCounts() if config.count_nan_logits else None


class NanCounts(RunnerFeature):
    """All rows of an engine that counts."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # [N] int64, of the step that runs

    def uses(self, admitted: AdmittedRequest) -> bool:
        return True

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        # No comparison with NaN is true.
        self._counts = (logits < float("inf")).logical_not().sum(-1)

    def after_sampling(self, logits: Tensor, token_ids: Tensor, logit_rows: LogitRows) -> PendingPart | None:
        if self._counts is None:
            return None
        counts, self._counts = to_host(self._counts), None
        rows, entries = logit_rows.rows.tolist(), logit_rows.entries.tolist()

        def read() -> dict[int, NanCount]:
            of_entries = counts.tolist()
            # Only a row's first token: a later one counts only if all of its logits are valid.
            first_entries = dict(zip(reversed(rows), reversed(entries), strict=True))
            return {
                row: NanCount(of_entries[entry]) for row, entry in first_entries.items() if of_entries[entry]
            }

        return read
