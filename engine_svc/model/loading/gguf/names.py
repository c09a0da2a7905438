"""Which tensors of a GGUF file make which weight of the model, under the names of Hugging Face. No torch."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine_svc.model.errors import CheckpointError, UnsupportedModel, listed
from engine_svc.model.loading.gguf.config import (
    LONG_FACTORS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    served_architecture,
)
from engine_svc.model.loading.gguf.file import FileTensor, GgufModel


class How(enum.Enum):
    """What makes a weight of the model from its tensors."""

    AS_IT_IS = enum.auto()
    # Of each head, rows 2 i and 2 i + 1 become rows i and i + head_dim / 2: llama.cpp rotates neighbours.
    UNPAIRED = enum.auto()
    LESS_ONE = enum.auto()
    # Several tensors become one whose last dimension takes from each in turn.
    ALTERNATED = enum.auto()
    # The same, of the transposed matrices of each expert.
    EXPERTS_TURNED = enum.auto()


@dataclass(frozen=True, slots=True)
class Origin:
    """How a weight of this shape is made. Parts of a tensor are named by their index: "exps.weight[3]"."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    how: How
    head_dim: int
    num_bytes: int  # of the tensors


@dataclass(frozen=True, slots=True)
class _Entry:
    """The weight that a tensor is or belongs to, with {} for the index of an expert, and its dimensions."""

    name: str
    dimensions: str
    how: How = How.AS_IT_IS


_OUTSIDE = {
    "token_embd.weight": _Entry("model.embed_tokens.weight", "vocabulary hidden"),
    "output_norm.weight": _Entry("model.norm.weight", "hidden"),
}
_HEAD = {"output.weight": _Entry("lm_head.weight", "vocabulary hidden")}

# Of one layer: behind "blk.N." here, "model.layers.N." there.
_NORMS = {
    "attn_norm.weight": _Entry("input_layernorm.weight", "hidden"),
    "ffn_norm.weight": _Entry("post_attention_layernorm.weight", "hidden"),
}
_ATTENTION = {
    "attn_q.weight": _Entry("self_attn.q_proj.weight", "queries hidden"),
    "attn_k.weight": _Entry("self_attn.k_proj.weight", "keys hidden"),
    "attn_v.weight": _Entry("self_attn.v_proj.weight", "keys hidden"),
    "attn_output.weight": _Entry("self_attn.o_proj.weight", "hidden queries"),
}
_QKV_BIASES = {
    "attn_q.bias": _Entry("self_attn.q_proj.bias", "queries"),
    "attn_k.bias": _Entry("self_attn.k_proj.bias", "keys"),
    "attn_v.bias": _Entry("self_attn.v_proj.bias", "keys"),
}
_OUTPUT_BIAS = {"attn_output.bias": _Entry("self_attn.o_proj.bias", "hidden")}
_HEAD_NORMS = {
    "attn_q_norm.weight": _Entry("self_attn.q_norm.weight", "head"),
    "attn_k_norm.weight": _Entry("self_attn.k_norm.weight", "head"),
}
_DENSE = {
    "ffn_gate.weight": _Entry("mlp.gate_proj.weight", "inner hidden"),
    "ffn_up.weight": _Entry("mlp.up_proj.weight", "inner hidden"),
    "ffn_down.weight": _Entry("mlp.down_proj.weight", "hidden inner"),
}
_DENSE_BIASES = {
    "ffn_gate.bias": _Entry("mlp.gate_proj.bias", "inner"),
    "ffn_up.bias": _Entry("mlp.up_proj.bias", "inner"),
    "ffn_down.bias": _Entry("mlp.down_proj.bias", "hidden"),
}
_EXPERTS = {
    "ffn_gate_inp.weight": _Entry("mlp.gate.weight", "experts hidden"),
    "ffn_gate_exps.weight": _Entry("mlp.experts.{}.gate_proj.weight", "experts expert hidden"),
    "ffn_up_exps.weight": _Entry("mlp.experts.{}.up_proj.weight", "experts expert hidden"),
    "ffn_down_exps.weight": _Entry("mlp.experts.{}.down_proj.weight", "experts hidden expert"),
}
_GEMMA_NORMS = {
    "attn_norm.weight": _Entry("input_layernorm.weight", "hidden"),
    "post_attention_norm.weight": _Entry("post_attention_layernorm.weight", "hidden"),
    "ffn_norm.weight": _Entry("pre_feedforward_layernorm.weight", "hidden"),
    "post_ffw_norm.weight": _Entry("post_feedforward_layernorm.weight", "hidden"),
    **_HEAD_NORMS,
}
_PHI3 = {
    **_NORMS,
    "attn_qkv.weight": _Entry("self_attn.qkv_proj.weight", "qkv hidden"),
    "attn_output.weight": _Entry("self_attn.o_proj.weight", "hidden queries"),
    "ffn_up.weight": _Entry("mlp.gate_up_proj.weight", "gate_up hidden"),
    "ffn_down.weight": _Entry("mlp.down_proj.weight", "hidden inner"),
}
_GATE_UP, _GATE_UP_BIAS = "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj_bias"
_GPT_OSS = {
    "attn_norm.weight": _Entry("input_layernorm.weight", "hidden"),
    "post_attention_norm.weight": _Entry("post_attention_layernorm.weight", "hidden"),
    **_ATTENTION,
    **_QKV_BIASES,
    **_OUTPUT_BIAS,
    "attn_sinks.weight": _Entry("self_attn.sinks", "heads"),
    "ffn_gate_inp.weight": _Entry("mlp.router.weight", "experts hidden"),
    "ffn_gate_inp.bias": _Entry("mlp.router.bias", "experts"),
    "ffn_gate_exps.weight": _Entry(_GATE_UP, "experts inner hidden", How.EXPERTS_TURNED),
    "ffn_up_exps.weight": _Entry(_GATE_UP, "experts inner hidden", How.EXPERTS_TURNED),
    "ffn_gate_exps.bias": _Entry(_GATE_UP_BIAS, "experts inner", How.ALTERNATED),
    "ffn_up_exps.bias": _Entry(_GATE_UP_BIAS, "experts inner", How.ALTERNATED),
    "ffn_down_exps.weight": _Entry("mlp.experts.down_proj", "experts hidden inner", How.EXPERTS_TURNED),
    "ffn_down_exps.bias": _Entry("mlp.experts.down_proj_bias", "experts hidden"),
}
# Tensors that config.json has instead.
_OF_CONFIG = {"llama": {ROPE_FACTORS}, "phi3": {LONG_FACTORS, SHORT_FACTORS}}


def read_origins(model: GgufModel, config: Mapping[str, Any]) -> dict[str, Origin]:
    """The weights of the model by name; config: the content of its config.json.

    Raises CheckpointError unless the file has just the tensors of its architecture, in the shapes of its
    metadata.
    """
    architecture = served_architecture(model)
    sizes = _sizes(config)
    origins: dict[str, Origin] = {}
    expected = set(_OF_CONFIG.get(architecture, ()))
    for name, entry in _entries(architecture, config):
        expected.add(name)
        shape = tuple(sizes[dimension] for dimension in entry.dimensions.split())
        tensor = _checked(model, name, shape)
        weights = _weights(name, entry, shape)
        num_bytes = tensor.num_bytes // len(weights)
        for weight, parts, its_shape in weights:
            origin = Origin(its_shape, parts, entry.how, config["head_dim"], num_bytes)
            origins[weight] = _joined(origins[weight], origin) if weight in origins else origin
    if unknown := model.tensors.keys() - expected:
        raise UnsupportedModel(f"{model.path} has tensors that no {architecture} has here: {listed(unknown)}")
    return origins


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    head_dim, heads, kv_heads = (
        config[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads")
    )
    inner = config["intermediate_size"]
    return {
        "vocabulary": config["vocab_size"],
        "hidden": config["hidden_size"],
        "head": head_dim,
        "heads": heads,
        "queries": heads * head_dim,
        "keys": kv_heads * head_dim,
        "qkv": (heads + 2 * kv_heads) * head_dim,
        "inner": inner,
        "gate_up": 2 * inner,
        "experts": config.get("num_experts") or config.get("num_local_experts") or 0,
        "expert": config.get("moe_intermediate_size") or 0,
    }


def _entries(architecture: str, config: Mapping[str, Any]) -> Iterator[tuple[str, _Entry]]:
    """Every tensor of such a model, with its entry."""
    how = How.LESS_ONE if architecture == "gemma3" else How.AS_IT_IS
    outside = _OUTSIDE if config["tie_word_embeddings"] else {**_OUTSIDE, **_HEAD}
    for tensor, entry in outside.items():
        yield tensor, replace(entry, how=how) if entry.dimensions == "hidden" else entry
    layer = _layer(architecture, config)
    for index in range(config["num_hidden_layers"]):
        for tensor, entry in layer.items():
            yield f"blk.{index}.{tensor}", replace(entry, name=f"model.layers.{index}.{entry.name}")


def _layer(architecture: str, config: Mapping[str, Any]) -> dict[str, _Entry]:
    if architecture == "llama":
        biases = {**_QKV_BIASES, **_OUTPUT_BIAS} if config["attention_bias"] else {}
        dense_biases = _DENSE_BIASES if config["mlp_bias"] else {}
        layer = {**_NORMS, **_ATTENTION, **biases, **_DENSE, **dense_biases}
        paired = {
            tensor: replace(entry, how=How.UNPAIRED)
            for tensor, entry in layer.items()
            if tensor.startswith(("attn_q.", "attn_k."))
        }
        return {**layer, **paired}
    if architecture == "gemma3":
        norms = {tensor: replace(entry, how=How.LESS_ONE) for tensor, entry in _GEMMA_NORMS.items()}
        return {**norms, **_ATTENTION, **_DENSE}
    return _LAYERS[architecture]


_LAYERS = {
    "qwen2": {**_NORMS, **_ATTENTION, **_QKV_BIASES, **_DENSE},
    "qwen3": {**_NORMS, **_ATTENTION, **_HEAD_NORMS, **_DENSE},
    "qwen3moe": {**_NORMS, **_ATTENTION, **_HEAD_NORMS, **_EXPERTS},
    "phi3": _PHI3,
    "gpt-oss": _GPT_OSS,
}


def _checked(model: GgufModel, name: str, shape: tuple[int, ...]) -> FileTensor:
    tensor = model.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{model.path} lacks tensor {name}")
    if tensor.shape != shape:
        raise CheckpointError(
            f"{model.path}: tensor {name} has shape {list(tensor.shape)}, by the metadata {list(shape)}"
        )
    return tensor


def _weights(
    tensor: str, entry: _Entry, shape: tuple[int, ...]
) -> list[tuple[str, tuple[str, ...], tuple[int, ...]]]:
    """The weights that the tensor is, or belongs to: name, parts of the tensor, shape with these alone."""
    if len(shape) < 3:
        return [(entry.name, (tensor,), shape)]
    parts = tuple(f"{tensor}[{index}]" for index in range(shape[0]))
    if entry.how is How.EXPERTS_TURNED:
        return [(entry.name, parts, (shape[0], shape[2], shape[1]))]
    return [(entry.name.format(index), (part,), shape[1:]) for index, part in enumerate(parts)]


def _joined(first: Origin, more: Origin) -> Origin:
    """Of two tensors that alternate in the last dimension."""
    return replace(
        first,
        shape=(*first.shape[:-1], first.shape[-1] + more.shape[-1]),
        tensors=first.tensors + more.tensors,
        num_bytes=first.num_bytes + more.num_bytes,
    )
