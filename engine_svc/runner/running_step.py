"""A step on the device, and the result it leaves on the host. Knows no rows and no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine_svc.core.step import PromptTokenLogprobs, StepPlan, StepResult
from engine_svc.runner.failures import raise_translated
from engine_svc.runner.prompt_rows import PromptPart
from engine_svc.runner.sampler import Sampled


class RunningStep:
    """What a plan will have yielded. Its copies to the host are under way; `result` waits for them."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sampled | None,
        device: torch.device,
        prompts: Sequence[PromptPart] = (),
        check: Callable[[], None] | None = None,
    ) -> None:
        """check: raises PeersLost where a GPU may have gone on without what other ranks had to send."""
        self._plan = plan
        self._prompts = prompts
        self._check = check
        self._sampled = sampled
        self._done: torch.cuda.Event | None = None
        if sampled is not None:
            self._token_ids = _to_host(sampled.token_ids)
            self._highest = _to_host(sampled.highest)
        # Also where nothing was sampled: of chunks that nobody waits for, a GPU would have any number queued.
        if device.type == "cuda" and plan.request_ids:
            self._done = torch.cuda.Event()
            self._done.record()

    def result(self) -> StepResult:
        """What the step yielded; waits until it is done. Raises DeviceLost, DeviceFull and PeersLost."""
        try:
            return self._result()
        except (RuntimeError, MemoryError) as error:
            raise_translated(error)

    def _result(self) -> StepResult:
        plan = self._plan
        if self._done is not None:
            self._done.synchronize()
            if self._check is not None:
                self._check()
        result = StepResult(plan.step_number, sampled=self._columns())
        for part in self._prompts:
            result.prompt_logprobs[part.index] = PromptTokenLogprobs(
                part.first_position, part.logprobs.to_columns()
            )
        if self._sampled is None:
            return result
        # Here and not with the choice: the next step does not wait for it.
        is_finite_of = self._highest.isfinite()
        if self._sampled.logprobs is None and is_finite_of.all():
            return result
        indices = [index for index, samples in enumerate(plan.samples) if samples]
        for entry in is_finite_of.logical_not().nonzero().flatten().tolist():
            index = indices[entry]
            result.sampled[index] = []
            # Rules leave a token out by minus infinity; a model that computes yields none.
            is_barred = self._highest[entry].item() == -math.inf
            (result.barred if is_barred else result.non_finite).append(index)
        if self._sampled.logprobs is not None:
            for entry, token_logprobs in self._sampled.logprobs.by_index().items():
                result.logprobs[indices[entry]] = token_logprobs
        return result

    def _columns(self) -> list[list[int]]:
        """What each row sampled, whether or not it means anything."""
        if self._sampled is None:
            return [[] for _ in self._plan.request_ids]
        tokens = self._token_ids.tolist()
        if len(tokens) == len(self._plan.request_ids):
            return [[token] for token in tokens]
        following = iter(tokens)
        return [[next(following)] if samples else [] for samples in self._plan.samples]


def _to_host(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        return values
    room = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return room.copy_(values, non_blocking=True)
