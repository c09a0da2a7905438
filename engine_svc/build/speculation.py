"""Builds what proposes drafts, and measures what verifying them costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_svc.build.start_check import PROPOSER_ENTRY_POINTS
from engine_svc.config import EngineConfig
from engine_svc.core.step import StepCosts
from engine_svc.runner.control import RunnerControl
from engine_svc.runner.drafts import Proposer
from engine_svc.speculation.ngram import NgramProposer
from engine_svc.speculation.suffix import SuffixProposer
from service_kit.plugins import find_offered

_PROPOSERS: dict[str, Callable[[], Proposer]] = {
    "ngram": NgramProposer,
    "suffix": SuffixProposer,
    "auto": SuffixProposer,
}


def make_proposer(config: EngineConfig) -> Proposer | None:
    """The proposer of one rank; None: no drafts."""
    method, _ = config.speculation
    if method == "off":
        return None
    return find_offered(method, _PROPOSERS, group=PROPOSER_ENTRY_POINTS, option="--speculative")()


def measure_step_costs(config: EngineConfig, control: RunnerControl) -> StepCosts:
    """Measures steps in all ranks at the same time; the slowest counts."""
    max_positions = min(config.max_num_batched_tokens, config.max_num_seqs * (1 + config.speculation[1]))
    measured: list[dict[str, Any]] = [
        dict(answer) for answer in control.call_all("step_costs", {"max_positions": max_positions})
    ]
    return StepCosts(
        tuple(measured[0]["counts"]),
        tuple(map(max, zip(*(answer["seconds"] for answer in measured), strict=True))),
        *(max(answer[name] for answer in measured) for name in ("seconds_per_read", "seconds_per_draw")),
    )
