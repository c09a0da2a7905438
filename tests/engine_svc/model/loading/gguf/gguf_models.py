"""Checkpoints as GGUF files, written with the gguf package, and as folders of the weights that these have."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

Numbers = npt.NDArray[np.float32]
# By the model type at transformers.
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
_IN_TURN = (Kind.Q8_0, Kind.Q4_0, Kind.F16, Kind.Q5_1, Kind.BF16, Kind.F32, Kind.Q5_0, Kind.Q4_1)
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
_ENUMS = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


def write_model(
    source: Path,
    config: PreTrainedConfig,
    path: Path,
    dequantized: Path,
    kind_of: Callable[[str], Kind],
    *,
    add_tokens: Callable[[gguf.GGUFWriter], None] | None = None,
) -> None:
    """Write the checkpoint in `source` as a GGUF file, and its weights as that has them to `dequantized`.

    kind_of: the type of a matrix, by its name in the checkpoint. Vectors stay as they are.
    add_tokens: writes the vocabulary, instead of one of some letters.
    """
    architecture = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config)
    if add_tokens is None:
        add_vocabulary(writer, config.vocab_size)
    else:
        add_tokens(writer)
    names = gguf.get_tensor_name_map(_ENUMS[architecture], config.num_hidden_layers)
    weights = load_file(source / "model.safetensors")
    kept: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Numbers]] = {}
    for name, weight in weights.items():
        kind = Kind.F32 if weight.dim() == 1 else kind_of(name)
        if architecture == "gpt-oss" and ".experts." in name:
            kept[name] = _add_gpt_oss_experts(writer, name, weight, kind)
            continue
        stem, _, end = (name, "", "weight") if name.endswith("sinks") else name.rpartition(".")
        numbers = _as_files_have_it(architecture, name, weight.float().numpy(), config)
        if ".experts." in name and architecture == "qwen3moe":
            before, expert, projection = stem.rsplit(".", 2)
            stacks.setdefault(f"{before}.{projection}", {})[int(expert)] = numbers
            kept[name] = torch.from_numpy(rounded(numbers, kind))
            continue
        written = names.get_name(stem)
        assert written is not None, name
        add(writer, f"{written}.{end}", numbers, kind)
        kept[name] = torch.from_numpy(_as_it_was(architecture, name, rounded(numbers, kind), config))
    for stem, of_experts in stacks.items():
        written = names.get_name(stem)
        assert written is not None, stem
        stack = np.stack([of_experts[index] for index in range(len(of_experts))])
        add(writer, f"{written}.weight", stack, kind_of(stem))
    close(writer)
    shutil.copytree(source, dequantized, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    save_file(kept, dequantized / "model.safetensors", metadata={"format": "pt"})


def types_in_turn(family: str) -> Callable[[str], Kind]:
    """A type for each matrix in turn."""
    kinds: dict[str, Kind] = {}

    def kind_of(name: str) -> Kind:
        # Experts of one projection are one tensor. Those of 16 channels have no whole block in a row.
        name = ".".join(part for part in name.removesuffix(".weight").split(".") if not part.isdigit())
        if family == "qwen3_moe" and name.endswith("down_proj"):
            return Kind.F16
        if family == "gpt_oss" and "experts" in name:
            return Kind.MXFP4
        return kinds.setdefault(name, _IN_TURN[len(kinds) % len(_IN_TURN)])

    return kind_of


def _add_gpt_oss_experts(writer: gguf.GGUFWriter, name: str, weight: Tensor, kind: Kind) -> Tensor:
    """Weights of all experts, or biases, of which gate and up are two tensors. Returns what the file has."""
    layer, is_bias = name.split(".")[2], name.endswith("_bias")
    projections = (
        {"gate": weight[..., ::2], "up": weight[..., 1::2]} if "gate_up" in name else {"down": weight}
    )
    read = torch.empty_like(weight)
    parts = [read[..., ::2], read[..., 1::2]] if "gate_up" in name else [read]
    for (projection, part), target in zip(projections.items(), parts, strict=True):
        numbers = (part if is_bias else part.transpose(1, 2)).contiguous().numpy()
        kind = Kind.F32 if is_bias else kind
        end = "bias" if is_bias else "weight"
        add(writer, f"blk.{layer}.ffn_{projection}_exps.{end}", numbers, kind)
        stored = torch.from_numpy(rounded(numbers, kind))
        target.copy_(stored if is_bias else stored.transpose(1, 2))
    return read


def rounded(numbers: Numbers, kind: Kind) -> Numbers:
    """The numbers as a file of this type has them."""
    if kind is Kind.F32:
        return numbers
    return gguf.quants.dequantize(gguf.quants.quantize(numbers, kind), kind)


def add(writer: gguf.GGUFWriter, name: str, numbers: Numbers, kind: Kind) -> None:
    if kind is Kind.F32:
        writer.add_tensor(name, np.ascontiguousarray(numbers))
    else:
        writer.add_tensor(name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, num_tokens: int) -> None:
    """A byte-level vocabulary of some letters, and names for the rest."""
    tokens = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab"]
    tokens += [f"<{index}>" for index in range(len(tokens), num_tokens)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (num_tokens - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def add_tokens_of(folder: Path, writer: gguf.GGUFWriter) -> None:
    """The vocabulary of a byte-level tokenizer.json, where 0 ends a text, and the chat template, if any.

    It is filled up to the model's as llama.cpp's conversion does it.
    """
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    types = [_CONTROL if token in special else _NORMAL for token in tokens]
    num_tokens = json.loads((folder / "config.json").read_text())["vocab_size"]
    tokens += [f"[PAD{index}]" for index in range(len(tokens), num_tokens)]
    types += [_UNUSED] * (num_tokens - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    template = folder / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


def _add_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    rope = config.rope_parameters
    if config.model_type == "gemma3_text":
        rope = rope["full_attention"]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(_head_dim(config))
    writer.add_value_length(_head_dim(config))
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma3_text":
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
    if config.model_type in ("qwen3_moe", "gpt_oss"):
        writer.add_expert_count(
            config.num_local_experts if config.model_type == "gpt_oss" else config.num_experts
        )
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            getattr(config, "moe_intermediate_size", config.intermediate_size)
        )


def _head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _as_files_have_it(architecture: str, name: str, weight: Numbers, config: PreTrainedConfig) -> Numbers:
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        # As llama.cpp's conversion does it.
        paired = weight.reshape(-1, 2, _head_dim(config) // 2, *weight.shape[1:]).swapaxes(1, 2)
        return paired.reshape(weight.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return weight + 1
    return weight


def _as_it_was(architecture: str, name: str, weight: Numbers, config: PreTrainedConfig) -> Numbers:
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        apart = weight.reshape(-1, _head_dim(config) // 2, 2, *weight.shape[1:]).swapaxes(1, 2)
        return np.ascontiguousarray(apart.reshape(weight.shape))
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return weight - 1
    return weight
