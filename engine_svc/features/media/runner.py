"""Encodes items before the first of their positions is computed, and keeps the outputs for later steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_svc.config import EngineConfig
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.media.extras import EncoderWork, MediaItems, PromptItem
from engine_svc.model.context import EmbeddedTokens, ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.model.encoders.encoder import EncodingModel, ItemEncoder
from engine_svc.runner.feature import RunnerContext, RunnerFeature
from engine_svc.runner.input_batch import StepInputs
from engine_svc.runner.sampling.transfer import Ints, send, to_device
from engine_svc.tensors.to_torch import to_torch


def make(config: EngineConfig, context: RunnerContext) -> RunnerFeature | None:
    encoder = _encoder_of(context.model)
    return None if encoder is None else EncodedRows(encoder, context.device, context.dtype)


def _encoder_of(model: Model) -> ItemEncoder | None:
    return model.item_encoder if isinstance(model, EncodingModel) else None


@dataclass(frozen=True, slots=True)
class _RowItem:
    """An item of a row. positions: [N], of its embeddings in the prompt, ascending."""

    item: PromptItem
    positions: Ints


class EncodedRows(RunnerFeature):
    """The items of rows, and the outputs of the encoder by key."""

    def __init__(self, encoder: ItemEncoder, device: torch.device, dtype: torch.dtype) -> None:
        self._encoder = encoder
        self._device = device
        self._dtype = dtype
        self._rows: dict[int, tuple[_RowItem, ...]] = {}
        self._outputs: dict[str, Tensor] = {}  # [N, hidden] of each

    def on_model(self, model: Model) -> None:
        encoder = _encoder_of(model)
        assert encoder is not None, "a model of the same form has an encoder, too"
        self._encoder = encoder
        self._outputs.clear()

    def uses(self, admitted: AdmittedRequest) -> bool:
        return MediaItems in admitted.extras

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        content: MediaItems = admitted.extras[MediaItems]
        self._rows[row] = tuple(_row_item(item) for item in content.items)

    def remove_row(self, row: int) -> None:
        self._rows.pop(row, None)

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        """Items are encoded where a row of the step needs them: the plan has room made for what is new.

        Also what should be here and is not, as the step that was to encode it has failed.
        """
        work: EncoderWork | None = inputs.extras.get(EncoderWork)
        if work is not None:
            for key in work.evicted:
                self._outputs.pop(key, None)
        positions: list[Ints] = []
        rows: list[Tensor] = []
        first_tokens = inputs.counts.cumsum() - inputs.counts
        for index, row in enumerate(inputs.rows.tolist()):
            computed, num_tokens = int(inputs.starts[index]), int(inputs.counts[index])
            for each in self._rows.get(row, ()):
                first, end = np.searchsorted(each.positions, [computed, computed + num_tokens]).tolist()
                if first < end:
                    positions.append(each.positions[first:end] - computed + first_tokens[index])
                    rows.append(self._output(each.item)[first:end])
        if positions:
            embedded = to_device(np.concatenate(positions), self._device)
            context.embedded = EmbeddedTokens(embedded, torch.cat(rows))
            # Models look the ids up before the embeddings replace the result.
            inputs.token_ids.index_fill_(0, embedded, 0)

    def _output(self, item: PromptItem) -> Tensor:
        output = self._outputs.get(item.key)
        if output is None:
            tensors = {each.name: send(to_torch(each.value), self._device) for each in item.content.inputs}
            output = self._outputs[item.key] = self._encoder.encode(tensors).to(self._dtype)
        return output


def _row_item(item: PromptItem) -> _RowItem:
    offsets = np.setdiff1d(np.arange(item.num_tokens), np.array(item.tokens, dtype=np.int64))
    return _RowItem(item, offsets + item.start)
