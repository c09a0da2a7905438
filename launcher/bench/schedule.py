"""When requests are due. Knows no clock: instants are seconds after the beginning."""

from __future__ import annotations

import math
import random
from itertools import accumulate


def arrival_offsets(num_arrivals: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Offsets of arrivals in s, the first at 0: gaps are gamma distributed with mean 1 / rate.

    `burstiness` is the shape: 1 is a Poisson process, below come bursts, above it gets regular. An infinite
    rate is everything at 0.
    """
    if math.isinf(rate):
        return [0.0] * num_arrivals
    rng = random.Random(f"arrivals-{seed}")
    gaps = (rng.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(num_arrivals - 1))
    return list(accumulate(gaps, initial=0.0))
