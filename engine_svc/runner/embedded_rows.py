"""Keeps the prompt embeddings of rows, and finds those that a step computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_svc.core.prompt_embeds import PromptEmbeds
from engine_svc.core.step import StepPlan
from engine_svc.model.context import EmbeddedTokens
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampling.transfer import Ints, send, to_device
from engine_svc.tensors.to_torch import to_torch


@dataclass(frozen=True, slots=True)
class _Held:
    """positions: [N] in the prompt, ascending, on the host.  embeds: [N, hidden], on the device."""

    positions: Ints
    embeds: Tensor


class EmbeddedRows:
    """The embeddings of rows that have any, in the model's dtype."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._held: dict[int, _Held] = {}

    def enter(self, row: int, content: PromptEmbeds | None) -> None:
        if content is not None:
            embeds = send(to_torch(content.embeds), self._device).to(self._dtype)
            self._held[row] = _Held(np.array(content.positions, dtype=np.int64), embeds)

    def leave(self, row: int) -> None:
        self._held.pop(row, None)

    def find(self, plan: StepPlan, inputs: StepInputs) -> EmbeddedTokens | None:
        """The tokens of the step that come as embeddings; None if there are none."""
        if not self._held:
            return None
        positions, rows = [], []
        starts = (inputs.counts.cumsum() - inputs.counts).tolist()
        for index, row in enumerate(inputs.rows.tolist()):
            held = self._held.get(row)
            if held is None:
                continue
            computed = plan.num_computed_tokens[index]
            first, end = np.searchsorted(
                held.positions, [computed, computed + plan.num_tokens[index]]
            ).tolist()
            if first < end:
                positions.append(held.positions[first:end] - computed + starts[index])
                rows.append(held.embeds[first:end])
        if not positions:
            return None
        return EmbeddedTokens(to_device(np.concatenate(positions), self._device), torch.cat(rows))
