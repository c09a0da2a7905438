"""What is simulated, and what is seen of it. Plain data."""

from __future__ import annotations

from dataclasses import astuple, dataclass, field

from benchmarks.cluster_sim_engine import EngineShape, SimulatedRequest
from benchmarks.cluster_sim_traffic import TrafficShape


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated."""

    num_engines: int
    num_frontends: int
    policy: str = "kv-aware"
    end_s: float = 10.0
    seed: int = 1
    loads_from: str = "both"  # "coordinator", "streams" or "both"
    on_wire: bool = False  # parse and serialize what the coordinator reads and writes
    with_requests: bool = True  # else engines report loads that chance makes up
    warm_s: float = 2.0  # until then nothing counts
    lose_at_s: float | None = None
    lost_part: float = 0.1
    is_cut_off: bool = True  # lost engines fall silent; else their streams break at once
    outage_at_s: float | None = None
    outage_s: float = 10.0
    engine: EngineShape = field(default_factory=EngineShape)
    traffic: TrafficShape = field(default_factory=TrafficShape)


@dataclass(frozen=True, slots=True)
class Cost:
    """What the coordinator has done."""

    seconds: float = 0.0  # virtual ones
    cpu_s: float = 0.0  # all of its code and asyncio's, serializing and parsing where `on_wire`; no gRPC
    num_published: int = 0
    published_bytes: int = 0
    num_loads: int = 0
    num_reports: int = 0
    reported_bytes: int = 0

    def __sub__(self, earlier: Cost) -> Cost:
        """What was done since."""
        return Cost(*(after - before for after, before in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(slots=True)
class Observed:
    """What was seen."""

    samples: list[tuple[float, float, float]] = field(default_factory=list)  # time, max, mean of requests
    ages_s: list[tuple[float, float]] = field(default_factory=list)  # time, age of a load at a frontend
    requests: list[SimulatedRequest] = field(default_factory=list)
    last_pick_of_lost_at: float | None = None
    num_picks_of_lost: int = 0
    num_moves: int = 0
