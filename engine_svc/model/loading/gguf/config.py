"""The content of config.json, from the metadata of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.gguf.file import TYPES, GgufModel, Metadata

# Tensors that describe rope.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
# Files that are no model, by `general.type` or `general.architecture`.
_OTHER_FILES = {
    "mmproj": "the part of a model that reads images (mmproj)",
    "clip": "the part of a model that reads images (mmproj)",
    "adapter": "a LoRA adapter",
    "controlvector": "a control vector",
    "imatrix": "an importance matrix",
}
# Settings that change what a model computes, and the value with which they do not. No model here has others.
_NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "embedding_scale": 0.0,
    "expert_gating_func": 1,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
    "logit_scale": 0.0,
    "nextn_predict_layers": 0,
    "residual_scale": 0.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}
# How Llama 3.1 and later stretch their context. Files have the result alone, a factor for each frequency.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_FACTOR_TOLERANCE = 1e-4
_GEMMA3_WINDOW_PATTERN = 6
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of a model: metadata whose keys begin with its architecture."""

    architecture: str
    metadata: Metadata

    def whole(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        return self.metadata.whole(self._key(name), default, minimum=minimum)

    def number(self, name: str, default: float | None = None) -> float:
        return self.metadata.number(self._key(name), default)

    def text(self, name: str, default: str) -> str:
        return self.metadata.text(self._key(name), default)

    def has(self, name: str) -> bool:
        return self._key(name) in self.metadata

    def refusal(self, name: str, why: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.metadata.path}: {self._key(name)} {why}")

    def _key(self, name: str) -> str:
        return f"{self.architecture}.{name}"


Content = dict[str, Any]
_Family = Callable[[GgufModel, _Settings, Content], Content]


def read_config(model: GgufModel) -> Content:
    """The content of config.json. Raises CheckpointError or UnsupportedModel.

    Its dtype is bfloat16 unless all numbers are F32: those of F16 come from bfloat16 in nearly all files, and
    no kernel of a CPU computes float16.
    """
    architecture = served_architecture(model)
    settings = _Settings(architecture, model.metadata)
    _check_neutral(settings)
    num_layers = settings.whole("block_count")
    if num_layers > len(model.tensors):
        raise CheckpointError(f"{model.path} has {len(model.tensors)} tensors for {num_layers} layers")
    if "token_embd.weight" not in model.tensors:
        raise CheckpointError(f"{model.path} lacks tensor token_embd.weight")
    hidden_size, num_heads = settings.whole("embedding_length"), settings.whole("attention.head_count")
    head_dim = settings.whole("attention.key_length", max(1, hidden_size // num_heads))
    num_kv_heads = settings.whole("attention.head_count_kv", num_heads)
    if settings.whole("attention.value_length", head_dim) != head_dim:
        raise settings.refusal("attention.value_length", f"is not that of keys, {head_dim}")
    if head_dim % 2 or num_heads % num_kv_heads:
        raise settings.refusal(
            "attention.head_count",
            f"is {num_heads}, for {num_kv_heads} heads of keys of {head_dim} channels",
        )
    are_f32 = all(tensor.type is TYPES[0] for tensor in model.tensors.values())
    content = {
        "hidden_act": "silu",
        "vocab_size": model.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": settings.whole("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": settings.whole("context_length"),
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_parameters": _rope(model, settings),
        "dtype": "float32" if are_f32 else "bfloat16",
        "bos_token_id": _token_id(model.metadata, "bos_token_id"),
        "eos_token_id": _token_id(model.metadata, "eos_token_id"),
        "pad_token_id": None,
    }
    return content | _FAMILIES[architecture](model, settings, content)


def served_architecture(model: GgufModel) -> str:
    """The architecture of the file. Raises UnsupportedModel unless it is a model of a served one."""
    architecture = model.metadata.text("general.architecture")
    for key in (model.metadata.text("general.type", "model"), architecture):
        if key in _OTHER_FILES:
            raise UnsupportedModel(f"{model.path} is {_OTHER_FILES[key]}; served are models, {_SERVED}")
    if architecture not in _FAMILIES:
        raise UnsupportedModel(f"{model.path} has architecture {architecture!r}; served are {_SERVED}")
    if not model.tensors:
        raise UnsupportedModel(f"{model.path} has no tensors: a vocabulary alone is not served")
    return architecture


def _check_neutral(settings: _Settings) -> None:
    for name, neutral in _NEUTRAL.items():
        if not settings.has(name):
            continue
        key = f"{settings.architecture}.{name}"
        read = settings.metadata.flag if isinstance(neutral, bool) else settings.metadata.number
        if (value := read(key)) != neutral:
            raise settings.refusal(name, f"is {value}, which is not served")


def _token_id(metadata: Metadata, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}"
    return metadata.whole(key, minimum=0) if key in metadata else None


def _rope(model: GgufModel, settings: _Settings) -> Content:
    """Parameters of rope for all layers."""
    rope: Content = {"rope_type": "default", "rope_theta": settings.number("rope.freq_base", 10000.0)}
    kind = settings.text("rope.scaling.type", "none")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn", "longrope"):
        raise settings.refusal(
            "rope.scaling.type", f"is {kind!r}; served are none, linear, yarn and longrope"
        )
    if kind == "longrope":
        # Its factors are tensors, which belong to families.
        if LONG_FACTORS not in model.tensors or SHORT_FACTORS not in model.tensors:
            raise CheckpointError(f"{model.path} lacks tensor {LONG_FACTORS} or {SHORT_FACTORS}")
        return rope
    factor = settings.number("rope.scaling.factor")
    if not factor >= 1:
        raise settings.refusal("rope.scaling.factor", f"is {factor}, must be at least 1")
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        context = settings.whole("context_length")
        rope["original_max_position_embeddings"] = settings.whole(
            "rope.scaling.original_context_length", context
        )
        for name in ("beta_fast", "beta_slow"):
            if settings.has(f"rope.scaling.yarn_{name}"):
                rope[name] = settings.number(f"rope.scaling.yarn_{name}")
        if settings.has("rope.scaling.attn_factor"):
            # Times what the method itself has.
            scale = settings.number("rope.scaling.attn_factor")
            rope["attention_factor"] = scale * (0.1 * math.log(factor) + 1.0)
    return rope


def _whole_heads_rotated(settings: _Settings, content: Content) -> None:
    rotated = settings.whole("rope.dimension_count", content["head_dim"])
    if rotated != content["head_dim"]:
        raise settings.refusal(
            "rope.dimension_count", f"is {rotated}, heads have {content['head_dim']} channels"
        )


def _llama(model: GgufModel, settings: _Settings, content: Content) -> Content:
    _whole_heads_rotated(settings, content)
    if settings.whole("expert_count", 0, minimum=0):
        raise settings.refusal(
            "expert_count", "is not 0: of mixtures of experts qwen3moe and gpt-oss are served"
        )
    rope = content["rope_parameters"]
    if ROPE_FACTORS in model.tensors:
        rope = _llama3_rope(model, rope, content["head_dim"])
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": rope,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in model.tensors,
    }


def _llama3_rope(model: GgufModel, rope: Content, head_dim: int) -> Content:
    factors = model.read_f32(ROPE_FACTORS)
    if rope["rope_type"] == "default" and len(factors) == head_dim // 2 and min(factors) > 0:
        stretched = rope | _LLAMA3_ROPE | {"rope_type": "llama3", "factor": max(factors)}
        expected = _llama3_factors(stretched, head_dim)
        if all(math.isclose(a, b, rel_tol=_FACTOR_TOLERANCE) for a, b in zip(factors, expected, strict=True)):
            return stretched
    raise UnsupportedModel(f"{model.path}: {ROPE_FACTORS} are not the factors of a Llama 3")


def _llama3_factors(rope: Content, head_dim: int) -> list[float]:
    """What each frequency is divided by: nothing where it is high, all of the factor where it is low."""
    factors = []
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    for index in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (index / head_dim)
        turns = rope["original_max_position_embeddings"] / wavelength
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - share) / rope["factor"] + share))
    return factors


def _qwen2(model: GgufModel, settings: _Settings, content: Content) -> Content:
    _whole_heads_rotated(settings, content)
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
    }


def _qwen3(model: GgufModel, settings: _Settings, content: Content) -> Content:
    return _qwen2(model, settings, content) | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
    }


def _qwen3moe(model: GgufModel, settings: _Settings, content: Content) -> Content:
    return _qwen3(model, settings, content) | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **_experts(settings, "num_experts"),
        "moe_intermediate_size": settings.whole("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        # Files do not say so; llama.cpp does it with each of this architecture.
        "norm_topk_prob": True,
    }


def _experts(settings: _Settings, name: str) -> Content:
    num_experts, num_chosen = settings.whole("expert_count"), settings.whole("expert_used_count")
    if num_chosen > num_experts:
        raise settings.refusal("expert_used_count", f"is {num_chosen}, there are {num_experts}")
    return {name: num_experts, "num_experts_per_tok": num_chosen}


def _gemma3(model: GgufModel, settings: _Settings, content: Content) -> Content:
    _whole_heads_rotated(settings, content)
    num_layers, head_dim = content["num_hidden_layers"], content["head_dim"]
    pattern = settings.whole("attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN)
    # The largest one alone has another scale, which files do not state.
    is_27b = num_layers == _GEMMA3_27B_LAYERS
    capping = settings.number("final_logit_softcapping", 0.0)
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": content["hidden_size"] // content["num_attention_heads"]
        if is_27b
        else head_dim,
        "sliding_window": settings.whole("attention.sliding_window"),
        "layer_types": [
            "sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(num_layers)
        ],
        "rope_parameters": {
            "full_attention": content["rope_parameters"],
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": settings.number("rope.freq_base_swa", 10000.0),
            },
        },
        "attention_bias": False,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": capping or None,
    }


def _phi3(model: GgufModel, settings: _Settings, content: Content) -> Content:
    head_dim = content["head_dim"]
    rotated = settings.whole("rope.dimension_count", head_dim)
    rope = content["rope_parameters"]
    if rotated != head_dim:
        rope |= {"partial_rotary_factor": rotated / head_dim}
    original = settings.whole("rope.scaling.original_context_length", content["max_position_embeddings"])
    if LONG_FACTORS in model.tensors and SHORT_FACTORS in model.tensors:
        rope |= {
            "rope_type": "longrope",
            "long_factor": model.read_f32(LONG_FACTORS),
            "short_factor": model.read_f32(SHORT_FACTORS),
            "original_max_position_embeddings": original,
        }
        if settings.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = settings.number("rope.scaling.attn_factor")
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "rope_parameters": rope,
        "original_max_position_embeddings": original,
        "sliding_window": settings.whole("attention.sliding_window", 0, minimum=0) or None,
    }


def _gpt_oss(model: GgufModel, settings: _Settings, content: Content) -> Content:
    _whole_heads_rotated(settings, content)
    num_layers, rope = content["num_hidden_layers"], content["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope |= {"truncate": False}
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        **_experts(settings, "num_local_experts"),
        "intermediate_size": settings.whole("expert_feed_forward_length", content["intermediate_size"]),
        "sliding_window": settings.whole("attention.sliding_window"),
        "layer_types": [
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
        ],
        "rope_parameters": rope,
        "attention_bias": True,
        "swiglu_limit": 7.0,
    }


_FAMILIES: dict[str, _Family] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3moe,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "gpt-oss": _gpt_oss,
}
_SERVED = ", ".join(_FAMILIES)
