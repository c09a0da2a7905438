"""The spec of a native decoder, read from a checkpoint's config. Knows no weights and no step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Names of the parts of a dense network, below a layer: gate, up, down.
_DENSE = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_PHI_DENSE = ("mlp.gate_up_proj", "mlp.gate_up_proj", "mlp.down_proj")
_GRANITE_SHARED = ("shared_mlp.input_linear", "shared_mlp.input_linear", "shared_mlp.output_linear")
# The same of a mixture of experts, behind its router.
_MIXTRAL_EXPERTS = (
    "block_sparse_moe.gate",
    "block_sparse_moe.experts.{}.w1",
    "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2",
)
_QWEN_EXPERTS = (
    "mlp.gate",
    "mlp.experts.{}.gate_proj",
    "mlp.experts.{}.up_proj",
    "mlp.experts.{}.down_proj",
)
# Gates and ups of all experts are one weight.
_GPT_OSS_EXPERTS = (
    "mlp.router",
    "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_proj",
    "mlp.experts.down_proj",
)
# Published checkpoints have the weights of all experts as one.
_QWEN3_5_STACKED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_QWEN3_5_SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj")
_GRANITE_EXPERTS = (
    "block_sparse_moe.router.layer",
    "block_sparse_moe.input_linear",
    "block_sparse_moe.input_linear",
    "block_sparse_moe.output_linear",
)
_GRANITE_STACKED = ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")
_FAMILIES = (
    "llama", "mistral", "phi3", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gemma3_text", "granite", "olmo2",
    "olmo3", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text",
    "granitemoehybrid",
)  # fmt: skip
_QWEN3_5 = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
# Model types of checkpoints whose text part is a decoder of a family.
_WITH_TEXT_PART = frozenset({"qwen3_5", "qwen3_5_moe"})
_GRANITE = frozenset({"granite", "granitemoehybrid"})
# Settings of families that the native decoder has with one value alone.
_GEMMA_SETTINGS = {
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_GPT_OSS_SETTINGS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
_ACTIVATIONS = {"gemma3_text": "gelu_pytorch_tanh"}  # of the others, silu
_GATES = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # names of the ops
# Families in which each layer states its own kind, with a window or without.
_FAMILIES_OF_LAYER_TYPES = frozenset({"qwen2", "qwen3", "gemma3_text", "olmo3", "gpt_oss"})
# Families in which a layer has attention without a window, or a recurrence.
_FAMILIES_OF_RECURRENCES = frozenset({*_QWEN3_5, "granitemoehybrid"})
# Families in which rope may rotate only a part of each head.
_FAMILIES_OF_PARTIAL_ROPE = _QWEN3_5
# Those of them in which each kind has a rope of its own.
_FAMILIES_OF_ROPES = frozenset({"gemma3_text", "olmo3"})
_KINDS = ("full_attention", "sliding_attention")
# The code of the other families ignores this setting.
_FAMILIES_OF_ATTENTION_BIAS = frozenset(
    {"llama", "qwen3", "qwen3_moe", "granite", "olmo2", "olmo3", "gpt_oss", "granitemoehybrid", *_QWEN3_5}
)
# With other types, a row's angles depend on the longest row of the batch, or on its own length.
_ROPE_TYPES = ("default", "linear", "yarn", "llama3")


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A feed-forward network that every token passes."""

    intermediate_size: int
    gate_name: str
    up_name: str  # that of the gate: the checkpoint has both as one weight
    down_name: str
    has_bias: bool = False  # each projection


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The mixture of experts that replaces a layer's feed-forward network."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalizes: bool  # the chosen experts' weights are scaled to add up to 1
    router_name: str
    gate_name: str  # with {} for the expert's index, as in the next two
    up_name: str
    down_name: str
    gate: str = "silu"  # see PackExperts
    # The checkpoint has the weights of all experts as one, [E, inputs, outputs], gates alternating with ups.
    is_alternating: bool = False
    # Names of weights of all experts, [E, outputs, inputs]: gates over ups, and down. Read if they are there.
    stacked_names: tuple[str, str] | None = None
    has_bias: bool = False  # each projection, and the router
    shared: DenseSpec | None = None  # that every token passes, too
    shared_gate_name: str | None = None  # a projection by whose sigmoid what it gives is multiplied


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Linear attention by the gated delta rule, in place of attention."""

    num_groups: int  # key heads, each of which several heads share
    key_dim: int
    num_heads: int
    head_dim: int
    conv_width: int  # tokens that a channel's convolution reads


@dataclass(frozen=True, slots=True)
class ScanSpec:
    """The state space recurrence of Mamba-2, in place of attention."""

    num_groups: int
    state_size: int
    num_heads: int
    head_dim: int
    conv_width: int  # tokens that a channel's convolution reads
    has_conv_bias: bool
    has_bias: bool  # the other projections
    dt_limit: tuple[float, float]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape of a decoder, and which of the optional parts it has."""

    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    eps: float
    gate: str  # see PackGatedLinear
    norms: str  # of a layer: "before" its parts, of what they read; "behind" them, of what they add; "around"
    has_qk_norm: bool
    qk_norm_spans_heads: bool  # the queries of all heads are normed together, and the keys
    has_sinks: bool  # each head attends to a number of its own, too
    has_gates: bool  # the projection of queries has each head's query with a gate behind it
    norms_are_offset: bool  # the checkpoint has the weights of norms less 1
    has_qkv_bias: bool
    has_out_bias: bool  # attention's output projection
    is_joined: bool  # the checkpoint has Q, K and V as one weight
    ties_embeddings: bool
    embedding_scale: float | None  # by which embeddings are multiplied
    input_scale: float | None  # by which embeddings are multiplied, prompts given as embeddings too
    attention_scale: float  # of a query's product with a key
    residual_scale: float | None  # of what attention and the feed-forward network add to the residual
    logits_divisor: float | None
    recurrences: tuple[DeltaSpec | ScanSpec | None, ...]  # per layer; None has attention
    windows: tuple[int | None, ...]  # per layer
    dense: DenseSpec  # of layers without experts
    experts: tuple[ExpertsSpec | None, ...]  # per layer; None is a dense network

    @property
    def has_experts(self) -> bool:
        """Whether any layer has a mixture of experts."""
        return any(self.experts)


class NotNative(ValueError):
    """The config needs something that the native decoder does not compute; the message names it."""


def read_spec(config: Any) -> DecoderSpec:
    """The spec of `config`, whose attributes have the names that transformers gives them.

    Raises NotNative, with the reason, if the native decoder would compute something else.
    """
    whole, config = config, _text_part(config)
    if config.model_type not in _FAMILIES:
        raise NotNative(f"there is no native decoder for model type {config.model_type}")
    if not getattr(config, "is_causal", True):
        raise NotNative(f"is_causal is {config.is_causal}, in the native decoder no token sees later ones")
    is_gemma = config.model_type == "gemma3_text"
    activation = config.hidden_activation if is_gemma else config.hidden_act
    expected = _ACTIVATIONS.get(config.model_type, "silu")
    if activation != expected:
        raise NotNative(f"hidden_act is {activation}, the native decoder has {expected}")
    if not config.rms_norm_eps >= 0:
        raise NotNative(f"rms_norm_eps is {config.rms_norm_eps}, which is not at least 0")
    if is_gemma:
        _check_settings(config, _GEMMA_SETTINGS)
    if config.model_type == "gpt_oss":
        _check_settings(config, _GPT_OSS_SETTINGS)
    _check_ropes(config)
    num_layers, family = config.num_hidden_layers, config.model_type
    is_granite, is_olmo = family in _GRANITE, family in ("olmo2", "olmo3")
    is_qwen3_5 = family in _QWEN3_5
    has_attention_bias = family in _FAMILIES_OF_ATTENTION_BIAS and bool(config.attention_bias)
    return DecoderSpec(
        model_type=family,
        hidden_size=config.hidden_size,
        num_layers=num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
        gate=_GATES[expected],
        norms="around" if is_gemma else "behind" if is_olmo else "before",
        has_qk_norm=is_gemma or is_olmo or family.startswith("qwen3"),
        qk_norm_spans_heads=is_olmo,
        has_sinks=family == "gpt_oss",
        has_gates=is_qwen3_5,
        norms_are_offset=is_gemma or is_qwen3_5,
        has_qkv_bias=family == "qwen2" or has_attention_bias,
        has_out_bias=has_attention_bias,
        is_joined=family == "phi3",
        # A config with a text part may state it beside that alone, which is what transformers reads.
        ties_embeddings=bool(config.tie_word_embeddings or whole.tie_word_embeddings),
        embedding_scale=config.hidden_size**0.5 if is_gemma else None,
        input_scale=_factor(config.embedding_multiplier) if is_granite else None,
        attention_scale=_attention_scale(config),
        residual_scale=_factor(config.residual_multiplier) if is_granite else None,
        logits_divisor=_factor(config.logits_scaling) if is_granite else None,
        recurrences=tuple(_recurrence(config, layer) for layer in range(num_layers)),
        windows=_windows(config),
        dense=_dense(config),
        experts=tuple(_experts(config, layer) for layer in range(num_layers)),
    )


def _text_part(config: Any) -> Any:
    return config.text_config if config.model_type in _WITH_TEXT_PART else config


def _attention_scale(config: Any) -> float:
    if config.model_type in _GRANITE:
        return float(config.attention_multiplier)
    name = "query_pre_attn_scalar" if config.model_type == "gemma3_text" else "head_dim"
    size = config.query_pre_attn_scalar if config.model_type == "gemma3_text" else _head_dim(config)
    if size <= 0:
        raise NotNative(f"{name} is {size}, which is not above 0")
    return float(size**-0.5)


def _factor(value: float) -> float | None:
    """None for one that changes nothing."""
    return None if value == 1 else float(value)


def rotary_table(config: Any, num_positions: int) -> Tensor:
    """[num_positions, rotary_dim] fp32, the cosines of each position's angles, then the sines.

    Where each kind of layers has its own, [2, num_positions, rotary_dim]: of those without a window, then of
    those with one.
    Source: Su et al. 2021, eq. 34; scaled kinds by the functions that transformers publishes.
    """
    config = _text_part(config)
    if not _has_rope(config):
        # Angles of 0 change nothing.
        return torch.tensor([1.0, 0.0]).repeat(num_positions, 1)
    tables = [_table(config, kind, rope, num_positions) for kind, rope in _ropes(config).items()]
    return tables[0] if len(tables) == 1 else torch.stack(tables)


def _table(config: Any, kind: str | None, rope: Mapping[str, Any], num_positions: int) -> Tensor:
    """Of the layers of this kind, None for all."""
    frequencies, scale = _plain_frequencies(config, rope), 1.0
    if rope["rope_type"] == "linear":
        frequencies /= rope["factor"]
    elif rope["rope_type"] != "default":
        # Imported here: it takes long, and the plain kinds do not need it.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, layer_type=kind)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies.float()
    return torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1)


def _plain_frequencies(config: Any, rope: Mapping[str, Any]) -> Tensor:
    """[rotary_dim / 2] fp32, radians per position."""
    rotary_dim = int(_head_dim(config) * rope.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies: Tensor = 1.0 / (rope["rope_theta"] ** exponents)
    return frequencies


def _check_settings(config: Any, settings: Mapping[str, Any]) -> None:
    """Raises NotNative for settings that the family's native decoder does not compute."""
    for name, expected in settings.items():
        if (value := getattr(config, name, expected)) != expected:
            raise NotNative(f"{name} is {value}, the native decoder of a {config.model_type} has {expected}")


def _check_ropes(config: Any) -> None:
    """Raises NotNative for ropes that the native decoder does not compute."""
    if not _has_rope(config):
        return
    for kind, rope in _ropes(config).items():
        stated, where = rope.get("rope_type"), "" if kind is None else f" of {kind}"
        if stated not in _ROPE_TYPES:
            raise NotNative(f"rope_type{where} is {stated}, the native decoder has {', '.join(_ROPE_TYPES)}")
        is_whole = rope.get("partial_rotary_factor", 1.0) == 1.0
        if not is_whole and config.model_type not in _FAMILIES_OF_PARTIAL_ROPE:
            raise NotNative("rope rotates only a part of each head")


def _has_rope(config: Any) -> bool:
    return config.model_type != "granitemoehybrid" or bool(config.position_embedding_type == "rope")


def _ropes(config: Any) -> dict[str | None, Mapping[str, Any]]:
    """The parameters of each kind of layers; under None, of all."""
    parameters: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    if config.model_type in _FAMILIES_OF_ROPES:
        return {kind: parameters.get(kind) or {} for kind in _KINDS}
    if "rope_type" not in parameters:
        raise NotNative("the config has no single set of rope parameters")
    return {None: parameters}


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _recurrence(config: Any, layer: int) -> DeltaSpec | ScanSpec | None:
    if config.model_type not in _FAMILIES_OF_RECURRENCES or config.layer_types[layer] == "full_attention":
        return None
    if config.layer_types[layer] != "linear_attention":
        raise NotNative(f"layer {layer} is of kind {config.layer_types[layer]}")
    if config.model_type == "granitemoehybrid":
        least, most = config.time_step_limit or (0.0, math.inf)
        return ScanSpec(
            num_groups=config.mamba_n_groups,
            state_size=config.mamba_d_state,
            num_heads=config.mamba_n_heads,
            head_dim=config.mamba_d_head,
            conv_width=config.mamba_d_conv,
            has_conv_bias=bool(config.mamba_conv_bias),
            has_bias=bool(config.mamba_proj_bias),
            dt_limit=(float(least), float(most)),
        )
    return DeltaSpec(
        num_groups=config.linear_num_key_heads,
        key_dim=config.linear_key_head_dim,
        num_heads=config.linear_num_value_heads,
        head_dim=config.linear_value_head_dim,
        conv_width=config.linear_conv_kernel_dim,
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if config.model_type == "llama" and window is not None:
        raise NotNative(f"sliding_window is {window}, which the code of a llama does not apply")
    # The code of the other families uses one mask for all layers, whatever layer types the config states.
    kinds = getattr(config, "layer_types", None) if config.model_type in _FAMILIES_OF_LAYER_TYPES else None
    kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _dense(config: Any) -> DenseSpec:
    if config.model_type == "granitemoehybrid":
        return DenseSpec(config.shared_intermediate_size, *_GRANITE_SHARED)
    has_bias = config.model_type in ("llama", "granite") and bool(config.mlp_bias)
    names = _PHI_DENSE if config.model_type == "phi3" else _DENSE
    # Of a family whose layers all have experts, a config need not have it.
    return DenseSpec(getattr(config, "intermediate_size", 0), *names, has_bias=has_bias)


def _experts(config: Any, layer: int) -> ExpertsSpec | None:
    if config.model_type == "mixtral":
        return ExpertsSpec(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            True,
            *_MIXTRAL_EXPERTS,
        )
    if config.model_type == "gpt_oss":
        return ExpertsSpec(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            True,
            *_GPT_OSS_EXPERTS,
            gate="clamped_swiglu",
            is_alternating=True,
            has_bias=True,
        )
    if config.model_type == "granitemoehybrid" and config.num_local_experts:
        return ExpertsSpec(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.intermediate_size,
            True,
            *_GRANITE_EXPERTS,
            stacked_names=_GRANITE_STACKED,
            shared=_dense(config),
        )
    if config.model_type == "qwen3_5_moe_text":
        return ExpertsSpec(
            config.num_experts,
            config.num_experts_per_tok,
            config.moe_intermediate_size,
            True,
            *_QWEN_EXPERTS,
            stacked_names=_QWEN3_5_STACKED,
            shared=DenseSpec(config.shared_expert_intermediate_size, *_QWEN3_5_SHARED),
            shared_gate_name="mlp.shared_expert_gate",
        )
    if config.model_type == "qwen3_moe":
        is_dense = layer in (config.mlp_only_layers or ()) or (layer + 1) % config.decoder_sparse_step
        if not is_dense and config.num_experts > 0:
            return ExpertsSpec(
                config.num_experts,
                config.num_experts_per_tok,
                config.moe_intermediate_size,
                bool(config.norm_topk_prob),
                *_QWEN_EXPERTS,
            )
    return None
