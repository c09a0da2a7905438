"""Reads the config.json of a native family without transformers, if the file states everything that counts.

Importing transformers takes as long as everything else that an engine does before its first token. A value
that the file omits has a default that only transformers knows, and an unknown key may change the model. In
both cases nothing is read here, and the caller has to use transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine_svc.model.loading.model_config import ModelConfig


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0


def _is_size_or_none(value: object) -> bool:
    return value is None or _is_size(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_false(value: object) -> bool:
    return value is False


def _is_ids(value: object) -> bool:
    ids = value if isinstance(value, list) else [value]
    return value is None or all(type(each) is int for each in ids)


_Check = Callable[[object], bool]


def _are_gemma_kinds(value: object) -> bool:
    return isinstance(value, list) and all(one in _GEMMA_KINDS for one in value)


def _are_hybrid_kinds(value: object) -> bool:
    """Whether some layers have attention, and all others a state."""
    # Of a model without attention transformers states another limit of positions.
    return (
        isinstance(value, list) and all(one in _HYBRID_KINDS for one in value) and "full_attention" in value
    )


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
}
# The type of the decoder of models of text and images, and what these may state beside it.
_TYPES_OF_TEXT = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
_BESIDE_TEXT = frozenset(
    {
        "architectures", "dtype", "image_token_id", "model_type", "quantization_config", "text_config",
        "tie_word_embeddings", "torch_dtype", "transformers_version", "video_token_id", "vision_config",
        "vision_end_token_id", "vision_start_token_id",
    }
)  # fmt: skip
# Kinds of layers, by their names before transformers 5.
_FORMER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
_GEMMA_KINDS = ("sliding_attention", "full_attention")
_HYBRID_KINDS = ("linear_attention", "full_attention")
# Required in every family, but for the activation: one has another name for another one.
_ACTIVATION: Mapping[str, _Check] = {"hidden_act": lambda value: value == "silu"}
_STATED: Mapping[str, _Check] = {
    "hidden_size": _is_size,
    "intermediate_size": _is_size,
    "max_position_embeddings": _is_size,
    "num_attention_heads": _is_size,
    "num_hidden_layers": _is_size,
    "num_key_value_heads": _is_size,
    "rms_norm_eps": _is_number,
    "tie_word_embeddings": _is_bool,
    "vocab_size": _is_size,
    "eos_token_id": _is_ids,
}
_OF_DELTA_RULE: Mapping[str, _Check] = {
    "head_dim": _is_size,
    "layer_types": _are_hybrid_kinds,
    "linear_conv_kernel_dim": _is_size,
    "linear_key_head_dim": _is_size,
    "linear_num_key_heads": _is_size,
    "linear_num_value_heads": _is_size,
    "linear_value_head_dim": _is_size,
}
_STATED_BY_FAMILY: Mapping[str, Mapping[str, _Check]] = {
    "phi3": {"sliding_window": _is_size_or_none},
    "gemma3_text": {
        "hidden_activation": lambda value: value == "gelu_pytorch_tanh",
        "head_dim": _is_size,
        "query_pre_attn_scalar": _is_size,
        "sliding_window": _is_size,
        "layer_types": _are_gemma_kinds,
        "attention_bias": _is_false,
        "use_bidirectional_attention": _is_false,
        "attn_logit_softcapping": lambda value: value is None,
        "final_logit_softcapping": lambda value: value is None,
    },
    "llama": {},
    "mistral": {"sliding_window": _is_size_or_none},
    "qwen2": {"use_sliding_window": _is_false},
    "qwen3": {"use_sliding_window": _is_false, "head_dim": _is_size},
    "mixtral": {
        "sliding_window": _is_size_or_none,
        "num_local_experts": _is_size,
        "num_experts_per_tok": _is_size,
    },
    "qwen3_moe": {
        "use_sliding_window": _is_false,
        "num_experts": _is_size,
        "num_experts_per_tok": _is_size,
        "moe_intermediate_size": _is_size,
        "decoder_sparse_step": _is_size,
        "norm_topk_prob": _is_bool,
        "mlp_only_layers": lambda value: isinstance(value, list) and _is_ids(value),
    },
    "qwen3_5_text": _OF_DELTA_RULE,
    "qwen3_5_moe_text": {
        **_OF_DELTA_RULE,
        # All layers have experts, whose size has another name.
        "intermediate_size": _is_count,
        "num_experts": _is_size,
        "num_experts_per_tok": _is_size,
        "moe_intermediate_size": _is_size,
        "shared_expert_intermediate_size": _is_size,
    },
    "granitemoehybrid": {
        "attention_multiplier": _is_number,
        "embedding_multiplier": _is_number,
        "layer_types": _are_hybrid_kinds,
        "logits_scaling": _is_number,
        "mamba_conv_bias": _is_bool,
        "mamba_d_conv": _is_size,
        "mamba_d_head": _is_size,
        "mamba_d_state": _is_size,
        "mamba_expand": _is_size,
        "mamba_n_groups": _is_size,
        "mamba_n_heads": _is_size,
        "mamba_proj_bias": _is_bool,
        "num_experts_per_tok": _is_count,
        "num_local_experts": _is_count,
        "position_embedding_type": lambda value: value is None or isinstance(value, str),
        "residual_multiplier": _is_number,
        "shared_intermediate_size": _is_size,
        "time_step_limit": lambda value: isinstance(value, tuple),
    },
}
# May be omitted; checked if present.
_OPTIONAL = frozenset(
    {"model_type", "head_dim", "dtype", "torch_dtype", "rope_parameters", "rope_theta", "rope_scaling"}
)
# If omitted, these are false in every family that has them.
_BIASES = ("attention_bias", "mlp_bias")
# Keys that do not affect what a native decoder computes; weights are read as their files have them.
_PASSED_OVER = frozenset(
    {
        "architectures", "attention_dropout", "bos_token_id", "initializer_range", "output_router_logits",
        "pad_token_id", "pretraining_tp", "quantization_config", "router_aux_loss_coef",
        "router_jitter_noise", "transformers_version", "use_cache",
    }
)  # fmt: skip
_OF_QWEN3_5 = frozenset(
    {
        "attn_output_gate", "decoder_sparse_step", "full_attention_interval", "mamba_ssm_dtype",
        "mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "norm_topk_prob",
        "output_gate_type",
    }
)  # fmt: skip
# The same, for families in which they have no effect.
_PASSED_OVER_BY_FAMILY = {
    "qwen3_5_text": _OF_QWEN3_5,
    "qwen3_5_moe_text": _OF_QWEN3_5,
    "granitemoehybrid": frozenset({"init_method", "mamba_chunk_size", "normalization_function"}),
    "phi3": frozenset({"embd_pdrop", "original_max_position_embeddings", "resid_pdrop"}),
    "gemma3_text": frozenset({"_sliding_window_pattern", "hidden_act"}),
}
# The same, for families that state that no layer has a window.
_OF_UNUSED_WINDOWS = frozenset({"layer_types", "max_window_layers", "sliding_window"})
# Of a MiMo, which is a Qwen2 with an MTP head, and which transformers does not know.
_OF_MIMO = frozenset({"auto_map", "num_nextn_predict_layers", "tokenizer_class"})
_DTYPE_NAMES = ("dtype", "torch_dtype")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_stated_config(folder: Path) -> ModelConfig | None:
    """The config of the checkpoint in `folder`; None if transformers has to read it."""
    try:
        content = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    content = _text_part(content) if isinstance(content, dict) else {}
    model_type = content.get("model_type")
    is_mimo = model_type == "mimo"
    if is_mimo and content.pop("use_mrope", False) is False:
        model_type = "qwen2"
        content = {name: value for name, value in content.items() if name not in _OF_MIMO}
        content.setdefault("eos_token_id", None)
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        return None
    if model_type == "qwen3_moe" and "num_experts" not in content:
        # The name in transformers since version 5.
        content["num_experts"] = content.pop("num_local_experts", None)
    if model_type == "qwen3_5_moe_text":
        content.setdefault("intermediate_size", 0)
    if model_type == "granitemoehybrid":
        _complete_granite(content)
    is_gemma = model_type == "gemma3_text"
    stated = {**_STATED, **({} if is_gemma else _ACTIVATION), **_STATED_BY_FAMILY[model_type]}
    if not all(name in content and check(content[name]) for name, check in stated.items()):
        return None
    allowed = {*stated, *_OPTIONAL, *_BIASES, *_PASSED_OVER, *_PASSED_OVER_BY_FAMILY.get(model_type, ())}
    if "use_sliding_window" in stated:
        allowed |= _OF_UNUSED_WINDOWS
    rope = _ROPES.get(model_type, _rope)(content)
    dtype = content.get("dtype", content.get("torch_dtype"))
    is_known = dtype is None or (isinstance(dtype, str) and dtype in _DTYPES)
    # transformers rejects other values, or interprets them differently.
    is_sound = (
        _have_whole_sizes(content, model_type)
        and _fits(content.get("layer_types"), content["num_hidden_layers"], "layer_types" in stated)
        and _is_size_or_none(content.get("head_dim"))
        and all(_is_bool(content.get(name, False)) for name in _BIASES)
        and not ("dtype" in content and "torch_dtype" in content)
    )
    if rope is None or not is_known or not is_sound or not set(content) <= allowed:
        return None
    values = {name: content[name] for name in stated} | {name: content.get(name, False) for name in _BIASES}
    values |= {"model_type": model_type, "rope_parameters": rope, "head_dim": content.get("head_dim")}
    return ModelConfig(
        architecture="MiMoForCausalLM" if is_mimo else _ARCHITECTURES[model_type],
        vocab_size=content["vocab_size"],
        max_position=content["max_position_embeddings"],
        eos_token_id=content["eos_token_id"],
        dtype=None if dtype is None else _DTYPES[dtype],
        config=SimpleNamespace(**values),
        model_class=None,
    )


def _text_part(content: dict[str, Any]) -> dict[str, Any]:
    """What describes the decoder; {} where other parts may change it."""
    whole_type = content.get("model_type")
    if not isinstance(whole_type, str) or whole_type not in _TYPES_OF_TEXT:
        return content
    part = content.get("text_config")
    if not isinstance(part, dict) or part.get("model_type") != _TYPES_OF_TEXT[whole_type]:
        return {}
    is_tied = [each.get("tie_word_embeddings", False) for each in (content, part)]
    if not content.keys() <= _BESIDE_TEXT or not all(_is_bool(each) for each in is_tied):
        return {}
    of_dtype = part if any(part.get(name) is not None for name in _DTYPE_NAMES) else content
    dtypes = {name: of_dtype[name] for name in _DTYPE_NAMES if name in of_dtype}
    others = {name: value for name, value in part.items() if name not in _DTYPE_NAMES}
    return {**others, **dtypes, "tie_word_embeddings": any(is_tied)}


def _complete_granite(content: dict[str, Any]) -> None:
    """Write kinds of layers and limits of steps as transformers does, with its defaults; others stay."""
    content.setdefault("position_embedding_type", None)
    kinds, limits = content.get("layer_types"), content.get("time_step_limit", [0.0, math.inf])
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        content["layer_types"] = [_FORMER_KINDS.get(kind, kind) for kind in kinds]
    if isinstance(limits, list):
        limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
        if len(limits) == 2 and all(_is_number(limit) for limit in limits):
            content["time_step_limit"] = tuple(limits)


def _have_whole_sizes(content: Mapping[str, Any], model_type: str) -> bool:
    """Whether sizes divide each other, where the code of the family expects that."""
    if model_type == "granitemoehybrid":
        width = content["mamba_expand"] * content["hidden_size"]
        if content["mamba_n_heads"] * content["mamba_d_head"] != width:
            return False
    has_own_heads = model_type in _TYPES_OF_TEXT.values()
    return has_own_heads or content["hidden_size"] % content["num_attention_heads"] == 0


def _fits(layer_types: Any, num_layers: int, may_differ: bool) -> bool:
    if layer_types is None:
        return True
    is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
    return is_list and (may_differ or all(kind == "full_attention" for kind in layer_types))


def _rope(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters of the default kind of rope, in the format of transformers 5 or of earlier versions."""
    if "rope_parameters" in content:
        rope = content["rope_parameters"]
        if "rope_theta" in content or "rope_scaling" in content:
            return None
    else:
        if content.get("rope_scaling") is not None:
            return None
        rope = {"rope_type": "default", "rope_theta": content.get("rope_theta")}
    if isinstance(rope, dict) and rope.get("partial_rotary_factor") == 1:
        rope = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return rope if _is_plain(rope) else None


def _is_plain(rope: object) -> bool:
    return (
        isinstance(rope, dict)
        and set(rope) == {"rope_type", "rope_theta"}
        and rope["rope_type"] == "default"
        and _is_number(rope["rope_theta"])
    )


def _gemma_rope(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters of both kinds of layers, which may be stretched by a factor."""
    rope = content.get("rope_parameters")
    if not isinstance(rope, dict) or set(rope) != set(_GEMMA_KINDS) or "rope_scaling" in content:
        return None
    return rope if all(_is_plain(each) or _is_stretched(each) for each in rope.values()) else None


def _is_stretched(rope: object) -> bool:
    return (
        isinstance(rope, dict)
        and set(rope) == {"rope_type", "rope_theta", "factor"}
        and rope["rope_type"] == "linear"
        and _is_number(rope["rope_theta"])
        and _is_number(rope["factor"])
        and rope["factor"] >= 1
    )


def _partial_rope(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters of the default kind, for a part of each head. Axes of images are the same for text."""
    rope = content.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" in content or "rope_scaling" in content:
        return None
    factor = rope.get("partial_rotary_factor")
    if not isinstance(factor, float) or not 0 < factor <= 1 or int(content["head_dim"] * factor) % 2:
        return None
    plain = {name: rope[name] for name in rope.keys() - _OF_AXES - {"partial_rotary_factor"}}
    return {**plain, "partial_rotary_factor": factor} if _is_plain(plain) else None


_OF_AXES = frozenset({"mrope_interleaved", "mrope_section"})
# Of families whose parameters are not those of `_rope`.
_ROPES: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
    "gemma3_text": _gemma_rope,
    "qwen3_5_text": _partial_rope,
    "qwen3_5_moe_text": _partial_rope,
}
