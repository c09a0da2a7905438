"""The count of logits that are not numbers, from a rank to the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from engine_svc.core.extras import OutputExtra


@dataclass(frozen=True, slots=True)
class NanCount(OutputExtra):
    """The number of logits of a row that were NaN or positive infinity."""

    count: int
    size_bytes: ClassVar[int] = 16
    stays_with_error: ClassVar[bool] = True

    def merged(self, later: NanCount) -> NanCount:
        return NanCount(self.count + later.count)

    def split(self, max_bytes: int) -> list[NanCount]:
        return [self]


EXTRAS = (NanCount,)
