"""Any transformers decoder over the paged KV cache, through transformers' own attention interface.

A step's tokens go through the model flattened, as one sequence with explicit positions. The model makes no
masks; its attention layers call back here: keys and values are written to the cache, queries read it.
Knows no checkpoint files and no request.
"""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine_svc.model.context import ForwardContext
from triptych_kernels import kv_write, paged_attention


@dataclass(slots=True)
class AttentionCall:
    """What an attention layer asks for. query: [1, H, T, D], key: [1, G, T, D], value: [1, G, T, E]."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scale: float
    window: int | None
    sinks: Tensor | None
    soft_cap: float | None
    others: dict[str, object]


Attend = Callable[[AttentionCall], Tensor]


class TransformersModel:
    """A transformers decoder whose attention reads and writes the cache of the step at hand.

    It must have been warmed up (warm_up.py), which is what refuses models that would run wrongly.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self.name = type(module).__name__
        self._attend: Attend = self._attend_paged
        self._context: ForwardContext | None = None
        self._layer = 0
        self._takes_logit_rows = "logits_to_keep" in inspect.signature(module.forward).parameters

    def take_over_attention(self) -> None:
        """From now on the module's attention layers ask this object."""
        name = f"triptych_{uuid.uuid4().hex}"

        # Some models drop keyword arguments on the way, so the step comes from this object, not the call.
        def attend(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            scaling: float | None = None,
            sliding_window: int | None = None,
            s_aux: Tensor | None = None,
            softcap: float | None = None,
            **others: object,
        ) -> tuple[Tensor, None]:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            call = AttentionCall(
                module, query, key, value, attention_mask, scale, sliding_window, s_aux, softcap, others
            )
            return self._attend(call), None

        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, _no_mask)
        self.module.set_attn_implementation(name)

    def forward_with(self, attend: Attend, token_ids: Tensor) -> None:
        """Run one sequence with `attend` in place of paged attention; it returns [1, T, H, E]."""
        self._attend = attend
        positions = torch.arange(token_ids.shape[0])
        self._run(token_ids, positions, positions)
        self._attend = self._attend_paged

    def forward(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, context: ForwardContext
    ) -> Tensor:
        """Logits [N, V] of the tokens at `logit_rows`; afterwards the cache holds the step's keys and values.

        token_ids, positions: [T] int64.  logit_rows: [N] int64, places in the step.
        """
        self._context = context
        self._layer = 0
        logits = self._run(token_ids, positions, logit_rows)
        assert self._layer == len(context.key_caches)
        self._context = None
        return logits

    def _run(self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        wish = {"logits_to_keep": logit_rows} if self._takes_logit_rows else {}
        output = self.module(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, return_dict=True, **wish
        )
        logits: Tensor = output.logits[0]
        return logits if self._takes_logit_rows else logits[logit_rows]

    def _attend_paged(self, call: AttentionCall) -> Tensor:
        context, layer = self._context, self._layer
        assert context is not None
        self._layer = layer + 1
        key_cache, value_cache = context.key_caches[layer], context.value_caches[layer]
        kv_write(
            call.key[0].transpose(0, 1),
            call.value[0].transpose(0, 1),
            key_cache,
            value_cache,
            context.slot_mapping,
        )
        attended: Tensor = paged_attention(
            call.query[0].transpose(0, 1),
            key_cache,
            value_cache,
            context.attention,
            scale=call.scale,
            window=call.window,
            sinks=call.sinks,
            soft_cap=call.soft_cap,
        )
        return attended[None]


def _no_mask(*_: object, **__: object) -> None:
    """The mask of a step: attention knows from the step's row lengths who may see whom."""
