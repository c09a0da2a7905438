"""Flags of the scheduler's trace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option, require


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    sched_trace_path: str | None = option(
        None,
        help="file to append what the scheduler decides to, as JSON lines for `triptych replay`; of several "
        "engines the one with index N > 0 appends -N to the name",
    )

    def check(self) -> None:
        path = self.sched_trace_path
        if path is None:
            return
        is_usable = not os.path.isdir(path) and os.access(Path(path).absolute().parent, os.W_OK)
        require(is_usable, "sched_trace_path", path, "a file in a folder that exists and is writable")
