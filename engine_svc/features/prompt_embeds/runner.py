"""Keeps the prompt embeddings of rows, and puts those that a step computes in the place of its tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.prompt_embeds.extras import PromptEmbeds
from engine_svc.model.context import EmbeddedTokens, ForwardContext
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.runner.feature import RunnerContext, RunnerFeature
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampling.transfer import Ints, send, to_device
from engine_svc.tensors.to_torch import to_torch

if TYPE_CHECKING:
    from engine_svc.model.transformers.model import TransformersModel

# In a row's token ids: these positions have no token that penalties and reasoning markers could match.
NO_TOKEN = -1


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature | None:
    if not config.enable_prompt_embeds:
        return None
    if not isinstance(context.model, NativeDecoder):
        cast("TransformersModel", context.model).check_embeds(torch.arange(8, device=context.device))
    return EmbeddedRows(context.device, context.dtype, context.token_ids)


@dataclass(frozen=True, slots=True)
class _Held:
    """positions: [N] in the prompt, ascending, on the host.  embeds: [N, hidden], on the device."""

    positions: Ints
    embeds: Tensor


class EmbeddedRows(RunnerFeature):
    """The embeddings of rows that have any, in the model's dtype. token_ids: of all rows."""

    def __init__(self, device: torch.device, dtype: torch.dtype, token_ids: Tensor) -> None:
        self._device = device
        self._dtype = dtype
        self._token_ids = token_ids
        self._held: dict[int, _Held] = {}

    def uses(self, admitted: AdmittedRequest) -> bool:
        return PromptEmbeds in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        content: PromptEmbeds = admitted.extras[PromptEmbeds]
        positions = np.array(content.positions, dtype=np.int64)
        embeds = send(to_torch(content.embeds), self._device).to(self._dtype)
        self._held[row] = _Held(positions, embeds)
        self._token_ids[row].index_fill_(0, to_device(positions, self._device), NO_TOKEN)

    def remove_row(self, row: int) -> None:
        self._held.pop(row, None)

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        positions, rows = [], []
        first_tokens = inputs.counts.cumsum() - inputs.counts
        for index, row in enumerate(inputs.rows.tolist()):
            held = self._held.get(row)
            if held is None:
                continue
            computed = inputs.starts[index]
            first, end = np.searchsorted(held.positions, [computed, computed + inputs.counts[index]]).tolist()
            if first < end:
                positions.append(held.positions[first:end] - computed + first_tokens[index])
                rows.append(held.embeds[first:end])
        if positions:
            embedded = to_device(np.concatenate(positions), self._device)
            context.embedded = EmbeddedTokens(embedded, torch.cat(rows))
            # Models look the ids up before the embeddings replace the result.
            inputs.token_ids.index_fill_(0, embedded, 0)
