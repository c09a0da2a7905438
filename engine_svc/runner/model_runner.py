"""Runs a plan: enters and releases rows, one forward over all its tokens, samples. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine_svc.model.context import ForwardContext
from engine_svc.model.facts import ModelFacts
from engine_svc.runner.hook import LogitsProcessor, RunnerHook
from engine_svc.runner.input_batch import InputBatch, StepInputs
from engine_svc.runner.kv_tensors import KVTensors
from engine_svc.runner.sampler import Sampler
from engine_svc.step import StepPlan, StepResult


class Model(Protocol):
    """A decoder over the paged cache."""

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Logits [N, V] of the tokens at `logit_rows`, all [T] or [N] int64."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """The sizes that rows and block tables are made for."""

    max_num_seqs: int
    max_model_len: int
    block_size: int


class ModelRunner:
    """Owns the rows and the KV tensors; one plan after the other."""

    def __init__(
        self,
        model: Model,
        facts: ModelFacts,
        kv: KVTensors,
        config: RunnerConfig,
        hooks: Sequence[RunnerHook] = (),
        logits_processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._model = model
        self._kv = kv
        self._hooks = tuple(hooks)
        self._sampler = Sampler(logits_processors)
        self._batch = InputBatch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            vocab_size=facts.vocab_size,
        )

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Do what the plan says and return one token for every row that samples."""
        if any(plan.draft_token_ids):
            raise ValueError(f"step {plan.step_number} has draft tokens, and nothing here verifies drafts")
        self._kv.clear(self._batch.apply(plan))
        if not plan.request_ids:
            return StepResult(plan.step_number, sampled=[])
        inputs = self._batch.gather(plan)
        for hook in self._hooks:
            hook.before_forward(plan, self._batch)
        logits = self._model.forward(
            inputs.token_ids,
            inputs.positions,
            inputs.logit_rows,
            ForwardContext(inputs.slot_mapping, inputs.attention, self._kv.key_caches, self._kv.value_caches),
        )
        for hook in self._hooks:
            hook.after_forward(plan, self._batch)
        return self._sample(plan, logits, inputs)

    def _sample(self, plan: StepPlan, logits: Tensor, inputs: StepInputs) -> StepResult:
        result = StepResult(plan.step_number, sampled=[[] for _ in plan.request_ids])
        if not len(inputs.sampling_rows):
            return result
        tokens, is_valid = self._sampler.choose(logits, self._batch, inputs.sampling_rows)
        self._batch.append(inputs.sampling_rows[is_valid], tokens[is_valid])
        indices = [index for index, samples in enumerate(plan.samples) if samples]
        for index, token, valid in zip(indices, tokens.tolist(), is_valid.tolist(), strict=True):
            if valid:
                result.sampled[index] = [token]
            else:
                result.non_finite.append(index)
        return result
