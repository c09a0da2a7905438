"""A fake model with logprobs of the tokens it samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from engine_svc.core.step import StepPlan, StepResult, TokenLogprobs

# The logprobs of one token of a request, by its id; None: nothing.
LogprobSource = Callable[[str], TokenLogprobs | None]


def emit_logprobs(executor: Any, source: LogprobSource) -> None:
    """Let `executor` report for each sampled token what `source` makes of its request's id."""
    launch = executor.launch

    def launch_with_logprobs(plan: StepPlan) -> Any:
        pending = launch(plan)
        return SimpleNamespace(result=lambda: _with_logprobs(plan, pending.result(), source))

    executor.launch = launch_with_logprobs


def _with_logprobs(plan: StepPlan, result: StepResult, source: LogprobSource) -> StepResult:
    logprobs: Mapping[int, TokenLogprobs | None] = {
        row: source(request_id)
        for row, (request_id, sampled) in enumerate(zip(plan.request_ids, result.sampled, strict=True))
        if sampled
    }
    return dataclasses.replace(
        result, logprobs={row: one for row, one in logprobs.items() if one is not None}
    )
