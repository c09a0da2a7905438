"""python -m benchmarks.contestants.triptych MODEL [--flag value ...]: the engine without its services.

The real loop, scheduler, cache and runner, with the flags of the engine; only the wire is left out.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading

from benchmarks.contestants.jobs import Prompts, serve
from benchmarks.engine_core import LocalEngine


def main() -> None:
    """Serve jobs with the engine that the command line describes."""
    engine = LocalEngine.start(sys.argv[1:])
    for thread in threading.enumerate():
        if thread.name == "model" and thread.native_id is not None:
            os.sched_setaffinity(thread.native_id, {int(os.environ["TRIPTYCH_BENCHMARK_CORE"])})
    numbers = itertools.count()

    def generate(prompts: Prompts, num_output_tokens: int) -> list[int]:
        names = [f"r{next(numbers)}" for _ in prompts]
        outputs = engine.generate(dict(zip(names, prompts, strict=True)), num_output_tokens)
        return [len(outputs[name]) for name in names]

    try:
        serve("triptych", generate)
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
