"""The ops that models are made of, as one table: their implementations are selected once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from triptych_kernels.attention_batch import AttentionBatch
from triptych_kernels.quantized import ExpertWeights, Weight
from triptych_kernels.state_batch import StateBatch

# To be raised with a change of any kernel after which some sum has other last bits, such as another order of
# its terms. Engines with different versions do not continue each other's requests.
SUMS_VERSION = 2


class Linear(Protocol):
    """A projection whose weight is packed for its device."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Size of weight and bias."""

    def __call__(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """x W^T + b + addend. x: [T, in_features], rows contiguous. Returns [T, out_features].

        addend: [T, N] fp32, contiguous; N outputs of the weight, so that of a gated projection is added
        before the activation. A product that its device computes in fp32 is rounded after the addition.
        """


class LowRankMatrices(Protocol):
    """The additions of one adapter to one part of a projection; packed once, and shared by slots."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def num_bytes(self) -> int: ...


class LowRank(Protocol):
    """The additions to one projection, by slot. A slot has a rank of its own for each part."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int:
        """Of all parts together."""

    @property
    def num_bytes(self) -> int:
        """Size of what is allocated for all slots, whether they are used or not."""

    @property
    def is_empty(self) -> bool:
        """Whether every slot is."""

    def put(self, slot: int, matrices: Sequence[LowRankMatrices | None]) -> None:
        """Replace what is in the slot. matrices: of each part, None adds nothing; they are kept alive.

        IndexError for a slot that there is not; ValueError, and no change, if a part does not fit.
        """

    def clear(self, slot: int) -> None:
        """Empty the slot: from now on it adds nothing."""

    def __call__(self, x: Tensor, slots: Tensor) -> Tensor:
        """scale * B A x of each token's slot, and 0 where there is none.

        x: [T, in_features], rows contiguous.  slots: [T] int64, -1 for none.  Returns [T, out_features] fp32.
        """


class MakeLowRank(Protocol):
    """Makes the additions to a projection, with nothing in any slot."""

    def __call__(
        self,
        in_features: int,
        widths: Sequence[int],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LowRank:
        """widths: outputs of each part of the projection, in their order.  dtype: of x and of matrices."""


@dataclass(frozen=True, slots=True)
class LayerLowRank:
    """The additions to the projections of a layer. gate_up: of gates over ups, before the activation."""

    qkv: LowRank | None = None
    out: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None


class Experts(Protocol):
    """The gated feed-forward networks of a mixture of experts."""

    num_bytes: int
    expert_range: tuple[int, int]  # half-open range of the model's experts that are here

    def take(self, first: int, end: int) -> Experts:
        """Experts first to end - 1, which must be here, in memory of their own."""

    def join(self, more: Experts) -> Experts:
        """These experts followed by `more` of the same kind and shape, in new memory."""

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Sum over a token's k experts, in order, of weight * down(silu(gate(x)) * up(x)), or another gate.

        x: [T, hidden].  expert_ids: [T, k] int32 or int64; ids outside this rank's experts add nothing.
        expert_weights: [T, k] fp32.  Returns [T, hidden] in x's dtype; the sum is in fp32.
        """


class PackLinear(Protocol):
    """Packs a weight once, at load."""

    def __call__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        quantization: str = "",
        activations: str = "exact",
    ) -> Linear:
        """weight: [N, K], bias: [N].  out_dtype: of the result, None is x's.

        quantization: "" keeps the weight as it is; "int8" stores int8 with one fp32 scale per output
        (symmetric, absolute maximum over 127); ValueError if the device has no such kernel. A weight
        that is quantized already, in a way that the device has no kernel for, is dequantized.
        activations: one of the device's, see Ops. "exact" multiplies rows as they are; "int8" rounds them to
        int8, with one scale per group of inputs, where a kernel does that for a weight that is quantized
        already.
        """


class PackGatedLinear(PackLinear, Protocol):
    """The same for gates over ups, [2 F, K]: the projection is the activation of gates times ups, [T, F]."""

    def __call__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        quantization: str = "",
        activations: str = "exact",
        gate: str = "silu",
    ) -> Linear:
        """gate: "silu" or "gelu_tanh", whose op is in Ops.  The others: see PackLinear."""


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    """Of each of E experts, what is added to its products before anything else is computed of them."""

    gate_up: Tensor  # [E, 2 F], gates first
    down: Tensor  # [E, hidden]

    @property
    def num_bytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def part(self, experts: slice) -> ExpertBiases:
        """Those of some of the experts, in memory of their own."""
        return ExpertBiases(self.gate_up[experts].clone(), self.down[experts].clone())


class PackExperts(Protocol):
    """Packs experts' weights once, at load."""

    def __call__(
        self,
        gate_up: ExpertWeights,
        down: ExpertWeights,
        *,
        biases: ExpertBiases | None = None,
        gate: str = "silu",
        first_expert: int = 0,
        activations: str = "exact",
    ) -> Experts:
        """Of each expert, gate_up: [2 F, hidden], gates first; down: [hidden, F].

        They are experts first_expert to first_expert + E - 1 of the model.  activations: see PackLinear.
        gate: "silu" or "clamped_swiglu", which reference/activation.py defines.
        """


class LayerCache(Protocol):
    """The KV cache of one attention layer."""

    @property
    def group(self) -> int:
        """Index of the layer group: layers of a group share block tables."""

    @property
    def key_cache(self) -> Tensor:
        """[B, G, S, D]."""

    @property
    def value_cache(self) -> Tensor:
        """[B, G, S, D]."""


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A decoder layer with a dense feed-forward network: its weights, all of them on this rank.

    Norms may be of the rows' dtype, or fp32.
    """

    input_norm: Tensor | None  # [hidden], as the other norms; None: attention reads the residual
    qkv: Linear
    query_norm: Tensor | None  # [head_dim] of each head, or [num_heads * head_dim] of all together
    key_norm: Tensor | None
    out: Linear
    post_attention_norm: (
        Tensor | None
    )  # of the residual, which the feed-forward network reads where it is None
    gate_up: Linear  # of pack_gated_linear
    down: Linear
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of a query's product with a key
    window: int | None
    cos_sin: Tensor  # [max_positions, rotary_dim] fp32
    eps: float
    attention_out_norm: Tensor | None = None  # of what attention adds to the residual
    feed_forward_out_norm: Tensor | None = None
    residual_scale: float | None = None  # of what is added to the residual, normed or not
    low_rank: LayerLowRank | None = None


class FusedLayers(Protocol):
    """All layers of a decoder as one op, with the same bits as their ops one by one."""

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        rows: Tensor,
        caches: Sequence[LayerCache],
        slot_mappings: Sequence[Tensor],
        attention: Sequence[AttentionBatch],
        low_rank_slots: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [N, hidden] of the tokens at `rows`, normed for the head; KV is stored.

        x: [T, hidden], embedded tokens, written.  positions: [T] int64.  rows: [N] int64, indices in the
        step.
        caches: of every layer.  slot_mappings: [T] int64 of every group, as attention.
        low_rank_slots: [T] int64, -1 for none; None: no token has one.
        IndexError and ValueError as the ops raise them; the cache may hold a part of the step then.
        """


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean) / sqrt(variance + eps) * weight + bias. weight, bias: [hidden]."""

    weight: Tensor
    bias: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """A layer whose tokens see all others of their prompt, then a feed-forward network with GELU (by erf).

    What each adds to its input is normed with it.
    """

    qkv: Linear  # queries, keys and values of all heads
    out: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    output_norm: LayerNorm


class FusedEncoder(Protocol):
    """All layers of an encoder as one op, but for their attention."""

    def __call__(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Hidden states [T, hidden].  x: [T, hidden], contiguous, written.

        attend: of a layer's [T, 3 * heads * D], queries before keys before values, what its attention
        gives: [T, heads * D], contiguous.
        """


@dataclass(frozen=True, slots=True)
class Penalised:
    """P rows of a step with penalties. On the device of the logits, contiguous: else ValueError.

    logit_rows: [P] int64, rows of the logits.  rows: [P] int64, rows of the token ids.
    num_prompt_tokens: [P] int64.  amounts: [3, P] fp32: presence, frequency, repetition.
    """

    logit_rows: Tensor
    rows: Tensor
    num_prompt_tokens: Tensor
    amounts: Tensor

    def __post_init__(self) -> None:
        num_rows = self.amounts.shape[-1]
        columns = (self.logit_rows, self.rows, self.num_prompt_tokens)
        if any(column.shape != (num_rows,) or column.dtype is not torch.int64 for column in columns):
            raise ValueError(f"columns of {num_rows} rows are {[tuple(column.shape) for column in columns]}")
        if self.amounts.shape != (3, num_rows) or self.amounts.dtype is not torch.float32:
            raise ValueError(f"amounts are {self.amounts.dtype} {tuple(self.amounts.shape)}")
        if not all(column.is_contiguous() for column in (*columns, self.amounts)):
            raise ValueError("columns are not contiguous")


@dataclass(frozen=True, slots=True)
class PackedParts:
    """What a packed projection or mixture is made of, to be kept in a file."""

    content: object  # of what JSON has: where the tensors belong, by their indices, and everything else
    tensors: tuple[Tensor, ...]


def _no_parts(parts: PackedParts) -> Linear | Experts:
    raise ValueError("what is packed here is not made of parts")


@dataclass(frozen=True, slots=True)
class Ops:
    """One function per op; reference/ defines what each computes. `name` appears in logs and fingerprints."""

    name: str
    is_batch_invariant: bool  # a token's result depends on no other row and not on how a prompt was chunked
    needs_clean_blocks: bool  # masked positions must hold finite numbers
    reads_common_blocks: bool  # attention uses num_common_blocks of a batch
    activations: tuple[str, ...]  # how rows may be multiplied with quantized weights, the fastest first
    pack_linear: PackLinear
    pack_gated_linear: PackGatedLinear
    pack_experts: PackExperts
    kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[..., Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rotary_kv_write: Callable[..., None]
    causal_conv: Callable[..., Tensor]
    ssd_scan: Callable[..., Tensor]
    gated_delta_rule: Callable[..., Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    sigmoid_and_mul: Callable[[Tensor], Tensor]
    greedy: Callable[[Tensor], tuple[Tensor, Tensor]]
    greedy_linear: Callable[[Linear, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    sample: Callable[..., Tensor]
    apply_token_mask: Callable[..., None]
    penalise: Callable[[Tensor, Tensor, Penalised, Tensor], None]
    # Arguments: A [r, in_features], B [out_features, r], and a scale. May run in any thread.
    pack_low_rank: Callable[[Tensor, Tensor, float], LowRankMatrices]
    make_low_rank: MakeLowRank
    # Of a packed projection, what gives rows [T, in_features] of its weight by their indices [T] int64, in
    # the dtype of its inputs. None where only products can be made of it.
    look_up: Callable[[Linear], Callable[[Tensor], Tensor] | None] = lambda linear: None
    # What is packed, as parts that share its memory; None where packing it again takes no longer than
    # reading them. And the same again of parts, which it keeps: ValueError for others.
    take_apart: Callable[[Linear | Experts], PackedParts | None] = lambda packed: None
    put_together: Callable[[PackedParts], Linear | Experts] = _no_parts
    # Arguments: layers and final_norm. None if the layers, or this device, do not support it.
    fuse_layers: Callable[[Sequence[DenseLayer], Tensor], FusedLayers | None] = lambda layers, final_norm: (
        None
    )
    # The same for an encoder, whose layers are only made if the device supports some.
    fuse_encoder: Callable[[Iterable[EncoderLayer]], FusedEncoder | None] = lambda layers: None


__all__ = [
    "AttentionBatch", "DenseLayer", "EncoderLayer", "ExpertBiases", "Experts", "FusedEncoder", "FusedLayers",
    "LayerCache", "LayerLowRank", "LayerNorm", "Linear", "LowRank", "LowRankMatrices", "MakeLowRank", "Ops",
    "PackExperts", "PackGatedLinear", "PackLinear", "PackedParts", "Penalised", "StateBatch",
]  # fmt: skip
