"""PYTHON -m benchmarks.contestants.memory THREADS: the rate at which as many threads read memory."""

from __future__ import annotations

import json
import sys
import time

import torch

_NUM_BYTES = 1 << 30  # more than any cache has
_ROUNDS = 7


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    content = torch.zeros(_NUM_BYTES // 4)
    best_s = min(_time_of_sum(content) for _ in range(_ROUNDS))
    print(json.dumps({"bytes_per_s": _NUM_BYTES / best_s}), flush=True)


def _time_of_sum(content: torch.Tensor) -> float:
    started_at = time.perf_counter()
    content.sum()
    return time.perf_counter() - started_at


if __name__ == "__main__":
    main()
