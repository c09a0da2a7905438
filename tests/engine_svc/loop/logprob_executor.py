"""A fake model that tells something of the tokens it samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from engine_svc.core.step import StepPlan, StepResult, TokenLogprobs

# What is told of one token of a request, by its id; None: nothing.
Teller = Callable[[str], TokenLogprobs | None]


def telling(executor: Any, tell: Teller) -> None:
    """Let `executor` tell of each sampled token what `tell` makes of its request's id."""
    launch = executor.launch

    def launch_and_tell(plan: StepPlan) -> Any:
        pending = launch(plan)
        return SimpleNamespace(result=lambda: _told(plan, pending.result(), tell))

    executor.launch = launch_and_tell


def _told(plan: StepPlan, result: StepResult, tell: Teller) -> StepResult:
    logprobs: Mapping[int, TokenLogprobs | None] = {
        row: tell(request_id)
        for row, (request_id, sampled) in enumerate(zip(plan.request_ids, result.sampled, strict=True))
        if sampled
    }
    return dataclasses.replace(
        result, logprobs={row: one for row, one in logprobs.items() if one is not None}
    )
