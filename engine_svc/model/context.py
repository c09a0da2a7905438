"""The inputs and outputs of one forward besides its tokens and their hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from triptych_kernels import AttentionBatch, StateBatch


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one attention layer, written. key_cache: [B, G, S, D], value_cache: [B, G, S, E]."""

    group: int  # index of the layer group: layers of a group share block tables
    key_cache: Tensor
    value_cache: Tensor


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """Tokens of a step that come as embeddings; their ids are ignored.

    positions: [K] int64, indices in the step.  rows: [K, hidden], in the model's dtype.
    """

    positions: Tensor
    rows: Tensor


@dataclass(slots=True)
class HiddenStates:
    """Hidden states of all tokens of a step, for a draft head or a feature; a forward writes them.

    layers: before which layers the residual stream is kept, in ascending order; (): what logits are computed
    from, instead.  tensors: [T, hidden] of each.
    """

    layers: tuple[int, ...]
    tensors: list[Tensor] = field(default_factory=list)

    def joined(self) -> Tensor:
        """[T, all together]."""
        return self.tensors[0] if len(self.tensors) == 1 else torch.cat(self.tensors, dim=-1)


@dataclass(slots=True)
class ForwardContext:
    """One step as attention sees it. `layers` is in the order in which a forward runs them.

    slot_mappings: per group, [T] int64.  attention: per group; one without blocks where there is no group.
    embedded: None where all tokens have ids.
    hidden: None where a draft head reads no hidden states.  last: those that logits are computed from, for
    features; None where none reads them.
    expert_choices: together with `last`, [T, k] int64 of each layer that chooses experts, in order; a forward
    writes them. None where nothing reads them.
    states: the slots of states that the rows read and write; None for a model without states. state_layers:
    of each layer with a state its tensors [slots, ...], written, in the order in which a forward runs them.
    low_rank_slots: [T] int64, whose low-rank additions each token gets, -1: none; None: no token has any.
    """

    layers: Sequence[LayerCache]
    slot_mappings: Sequence[Tensor]
    attention: Sequence[AttentionBatch]
    states: StateBatch | None = None
    state_layers: Sequence[tuple[Tensor, ...]] = ()
    embedded: EmbeddedTokens | None = None
    hidden: HiddenStates | None = None
    last: HiddenStates | None = None
    token_types: Tensor | None = None  # [T] int64, 1 for tokens of a second text; None: all are 0
    low_rank_slots: Tensor | None = None
    expert_choices: list[Tensor] | None = None

    @property
    def can_be_recorded(self) -> bool:
        """Whether the step reads ids and writes logits alone, beside caches, as recorded steps do."""
        return (
            self.embedded is None
            and self.hidden is None
            and self.last is None
            and self.low_rank_slots is None
            and self.expert_choices is None
        )

    def low_rank_slots_of(self, rows: Tensor | None) -> Tensor | None:
        """The slots of the tokens at `rows`, [N] int64, or of all."""
        return (
            self.low_rank_slots if self.low_rank_slots is None or rows is None else self.low_rank_slots[rows]
        )
