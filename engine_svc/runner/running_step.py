"""A step on the device, and its result on the host. Knows no rows and no model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from engine_svc.core.errors import describe_failure
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.runner.failures import raise_translated
from engine_svc.runner.feature import FeaturePart, RuleConflict, is_of_device
from engine_svc.runner.input_batch import DraftEntries
from engine_svc.runner.sampler import Sampled
from engine_svc.runner.sampling.transfer import Ints, to_host


class RunningStep:
    """A launched step. Its copies to the host are in flight; `result` waits for them."""

    def __init__(
        self,
        plan: StepPlan,
        sampled: Sampled | None,
        device: torch.device,
        rows: Ints | None = None,
        *,
        parts: Sequence[FeaturePart] = (),
        failed: Mapping[int, str] = MappingProxyType({}),
        drafts: DraftEntries | None = None,
        counts_drafts: bool = False,
        check: Callable[[], None] | None = None,
    ) -> None:
        """rows: the batch's, of the plan's rows.  failed: rows of the plan that end, as a feature raised.

        counts_drafts: the scheduler's plan had drafts; how many there are is returned, also if none is left.
        check: raises PeersLost if a GPU may have continued without the data of other ranks.
        """
        self._plan = plan
        self._rows = rows
        self._parts = parts
        self._failed = failed
        self._drafts = drafts
        self._counts_drafts = counts_drafts
        self._counting: Ints | None = None  # the sampled tokens, once drafts are verified
        self._check = check
        self._sampled = sampled
        self._done: torch.cuda.Event | None = None
        if sampled is not None:
            self._token_ids = to_host(sampled.token_ids)
            self._highest = to_host(sampled.highest)
        # Also if nothing was sampled: otherwise a GPU could queue any number of prefill chunks.
        if device.type == "cuda" and plan.request_ids:
            self._done = torch.cuda.Event()
            self._done.record()

    def sampled_ids(self) -> Ints:
        """The sampled tokens [N], -1 for those that do not count; waits until they are on the host."""
        if self._done is not None:
            self._done.synchronize()
        token_ids: Ints = self._token_ids.numpy()
        if self._drafts is None:
            return token_ids
        if self._counting is None:
            is_valid = self._drafts.find_valid(token_ids, self._highest.isfinite().numpy())
            self._counting = np.where(is_valid, token_ids, -1)
        return self._counting

    def result(self) -> StepResult:
        """The step's result; waits until it is done. Raises DeviceLost, DeviceFull and PeersLost."""
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
        if self._counts_drafts:
            result.num_drafts = [len(drafts) for drafts in plan.draft_token_ids]
        if self._parts or self._failed:
            self._add_of_features(result)
        if self._sampled is not None:
            self._add_of_sampler(result, self._sampled)
        result.clear_faulty()
        return result

    def _add_of_sampler(self, result: StepResult, sampled: Sampled) -> None:
        # Done here and not when tokens are chosen: the next step does not wait for it.
        is_finite_of = self._highest.isfinite()
        if sampled.logprobs is None and is_finite_of.all():
            return
        indices = self._rows_of_entries()
        for entry in is_finite_of.logical_not().nonzero().flatten().tolist():
            if indices[entry] < 0:
                continue
            # Token rules exclude a token by minus infinity; a model's own logits are never minus infinity.
            is_barred = self._highest[entry].item() == -math.inf
            (result.barred if is_barred else result.non_finite).append(indices[entry])
        if sampled.logprobs is not None:
            for entry, token_logprobs in sampled.logprobs.by_index().items():
                if (index := indices[entry]) in result.logprobs:
                    result.logprobs[index].extend(token_logprobs)
                elif index >= 0:
                    result.logprobs[index] = token_logprobs

    def _rows_of_entries(self) -> list[int]:
        """The plan's row of each sampled token, -1 for those that do not count."""
        sampling = [index for index, samples in enumerate(self._plan.samples) if samples]
        if self._drafts is None:
            return sampling
        drafts = self._plan.draft_token_ids
        indices = [index for index in sampling for _ in range(1 + len(drafts[index]))]
        return [index if token >= 0 else -1 for index, token in zip(indices, self.sampled_ids(), strict=True)]

    def _add_of_features(self, result: StepResult) -> None:
        assert self._rows is not None, "a step with features has rows"
        index_of = {row: index for index, row in enumerate(self._rows.tolist())}
        result.failed.update(self._failed)
        result.barred.extend(row for row, why in self._failed.items() if isinstance(why, RuleConflict))
        for part in self._parts:
            try:
                extras = part.read()
            except Exception as error:
                if is_of_device(error):
                    raise
                message = describe_failure(part.feature, error)
                result.failed.update((index_of[row], message) for row in part.rows)
                continue
            for row, extra in extras.items():
                if isinstance(extra, str):
                    result.failed[index_of[row]] = extra
                    continue
                result.extras.setdefault(type(extra), {})[index_of[row]] = extra

    def _columns(self) -> list[list[int]]:
        """The tokens of each row that samples, the first valid or not."""
        if self._sampled is None:
            return [[] for _ in self._plan.request_ids]
        if self._drafts is not None:
            columns: list[list[int]] = [[] for _ in self._plan.request_ids]
            for index, token in zip(self._rows_of_entries(), self.sampled_ids().tolist(), strict=True):
                if index >= 0:
                    columns[index].append(token)
            return columns
        tokens = self._token_ids.tolist()
        if len(tokens) == len(self._plan.request_ids):
            return [[token] for token in tokens]
        following = iter(tokens)
        return [[next(following)] if samples else [] for samples in self._plan.samples]
