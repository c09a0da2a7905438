"""How the garbage collector runs in an engine's process."""

from __future__ import annotations

import gc


def calm_collector() -> None:
    """Have the collector look at less, and less often. Called once, when the engine is built.

    What is alive now lives as long as the process. What comes later dies by reference counts, all but errors'
    tracebacks, while a full collection visits every token of every request: 10 to 20 ms at 1,024 requests, 30
    times a step's scheduling.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
