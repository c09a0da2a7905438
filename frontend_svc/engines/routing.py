"""Which engine gets a request: a pure function of what is known about the engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# A request that waits says more about the next one's fate than one that runs.
_WAITING_WEIGHT = 4


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A ready engine as routing sees it.

    `num_unreported` are requests of ours that the engine's last report cannot know of; they are counted as
    waiting, so that a burst spreads before the first report about it arrives.
    """

    address: str
    dp_rank: int
    num_waiting: int
    num_running: int
    num_unreported: int
    num_in_flight: int
    is_held: bool = False  # an operator has it pause or sleep: what is sent there waits

    @property
    def load(self) -> tuple[int, int]:
        """Sorts engines from idle to busy: what is reported and what is not yet, then what is ours."""
        return _WAITING_WEIGHT * (
            self.num_waiting + self.num_unreported
        ) + self.num_running, self.num_in_flight


def pick_engine(
    engines: Sequence[EngineInfo], *, data_parallel_rank: int | None, turn: int
) -> EngineInfo | None:
    """The least loaded engine, of `data_parallel_rank` where one is pinned; None when there is none.

    One that is held gets requests only where all are. Among equals the choice goes round with `turn`, a
    number the caller counts up.
    """
    candidates = [
        engine for engine in engines if data_parallel_rank is None or engine.dp_rank == data_parallel_rank
    ]
    if not candidates:
        return None
    first = turn % len(candidates)
    return min(candidates[first:] + candidates[:first], key=lambda engine: (engine.is_held, engine.load))
