"""Reads the config.json of a native family without transformers, if the file states everything that counts.

Importing transformers takes as long as everything else that an engine does before its first token. A value
that the file omits has a default that only transformers knows, and an unknown key may change the model. In
both cases nothing is read here, and the caller has to use transformers.
"""

from __future__ import annotations

import json
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

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_GEMMA_KINDS = ("sliding_attention", "full_attention")
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
_STATED_BY_FAMILY: Mapping[str, Mapping[str, _Check]] = {
    "phi3": {"sliding_window": _is_size_or_none},
    "gemma3_text": {
        "hidden_activation": lambda value: value == "gelu_pytorch_tanh",
        "head_dim": _is_size,
        "query_pre_attn_scalar": _is_size,
        "sliding_window": _is_size,
        "layer_types": lambda value: isinstance(value, list) and all(one in _GEMMA_KINDS for one in value),
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
# The same, for families in which they have no effect.
_PASSED_OVER_BY_FAMILY = {
    "phi3": frozenset({"embd_pdrop", "original_max_position_embeddings", "resid_pdrop"}),
    "gemma3_text": frozenset({"_sliding_window_pattern", "hidden_act"}),
}
# The same, for families that state that no layer has a window.
_OF_UNUSED_WINDOWS = frozenset({"layer_types", "max_window_layers", "sliding_window"})
# Of a MiMo, which is a Qwen2 with an MTP head, and which transformers does not know.
_OF_MIMO = frozenset({"auto_map", "num_nextn_predict_layers", "tokenizer_class"})
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def read_stated_config(folder: Path) -> ModelConfig | None:
    """The config of the checkpoint in `folder`; None if transformers has to read it."""
    try:
        content = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return None
    model_type = content.get("model_type") if isinstance(content, dict) else None
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
    is_gemma = model_type == "gemma3_text"
    stated = {**_STATED, **({} if is_gemma else _ACTIVATION), **_STATED_BY_FAMILY[model_type]}
    if not all(name in content and check(content[name]) for name, check in stated.items()):
        return None
    allowed = {*stated, *_OPTIONAL, *_BIASES, *_PASSED_OVER, *_PASSED_OVER_BY_FAMILY.get(model_type, ())}
    if "use_sliding_window" in stated:
        allowed |= _OF_UNUSED_WINDOWS
    rope = _gemma_rope(content) if is_gemma else _rope(content)
    dtype = content.get("dtype", content.get("torch_dtype"))
    is_known = dtype is None or (isinstance(dtype, str) and dtype in _DTYPES)
    # transformers rejects other values, or interprets them differently.
    is_sound = (
        content["hidden_size"] % content["num_attention_heads"] == 0
        and _fits(content.get("layer_types"), content["num_hidden_layers"], is_gemma)
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


def _fits(layer_types: Any, num_layers: int, may_have_windows: bool) -> bool:
    if layer_types is None:
        return True
    is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
    return is_list and (may_have_windows or all(kind == "full_attention" for kind in layer_types))


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
