"""`serve` with what cannot start: its last line is the cause, in the words of the command line, and exit 2.

All that the folder, the flags and the machine alone decide is refused before any process is started.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from engine_svc.build import start_check
from engine_svc.build.start_check import check_start
from engine_svc.config import EngineConfig
from engine_svc.model.errors import CheckpointError
from tests.triptych_cli.fakes import triptych
from triptych_cli import cli as cli_module
from triptych_cli.cli import app
from triptych_cli.serve import serve as serve_module
from triptych_cli.services import embedded_model
from triptych_kit.config import ConfigError

_EMBEDDED = embedded_model()
Arrange = Callable[[Path], list[str]]
"""Makes what is wrong in a folder; returns the arguments of `serve`."""
Tensor = tuple[str, tuple[int, ...]]
"""Its dtype and shape."""

_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_MODULE = "model.layers.0.mlp.up_proj"


def model_folder(folder: Path, *names: str, config: Mapping[str, Any] | None = None) -> Path:
    """A folder with these files of the embedded model, and its config.json with these values beside them."""
    for name in names:
        shutil.copy(_EMBEDDED / name, folder)
    content = json.loads((_EMBEDDED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **(config or {})}))
    return folder


def write_zeros(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file of these tensors, which takes no room on the disk."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + _BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(content)) + content)
    os.truncate(path, path.stat().st_size + end)


def only_pickles(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    (folder / "pytorch_model.bin").write_bytes(b"PK")
    return [str(folder)]


def only_gguf(folder: Path) -> list[str]:
    (folder / "model.Q4_K_M.gguf").write_bytes(b"GGUF")
    return [str(folder)]


def gguf_beside_a_config(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    return only_gguf(folder)


def a_gguf_file(folder: Path) -> list[str]:
    only_gguf(folder)
    return [str(folder / "model.Q4_K_M.gguf")]


def an_adapter(folder: Path) -> list[str]:
    (folder / "adapter_config.json").write_text("{}")
    return [str(folder)]


def truncated(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json", "model.safetensors")
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    return [str(folder)]


def garbage(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    (folder / "model.safetensors").write_bytes(b"<html>404 Not Found</html>")
    return [str(folder)]


def a_missing_shard(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    shutil.copy(_EMBEDDED / "model.safetensors", folder / shards["a"])
    return [str(folder)]


def stating(config: Mapping[str, Any]) -> Arrange:
    def arrange(folder: Path) -> list[str]:
        return [str(model_folder(folder, "tokenizer.json", "model.safetensors", config=config))]

    return arrange


def llama4(config: Mapping[str, Any], *flags: str) -> Arrange:
    return lambda folder: [*stating({"text_config": {"model_type": "llama4_text", **config}})(folder), *flags]


def quantized(section: Mapping[str, Any] | None, tensors: Mapping[str, Tensor]) -> Arrange:
    """A folder of these tensors of one module, whose config.json has this section."""

    def arrange(folder: Path) -> list[str]:
        model_folder(folder, "tokenizer.json", config=section and {"quantization_config": section})
        named = {f"{_MODULE}.{part}": tensor for part, tensor in tensors.items()}
        write_zeros(folder / "model.safetensors", named)
        return [str(folder)]

    return arrange


def with_group(arrange: Arrange, group: int) -> Arrange:
    """The first column is in this group."""

    def changed(folder: Path) -> list[str]:
        arguments = arrange(folder)
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        (length,) = struct.unpack_from("<Q", content)
        header = json.loads(content[8 : 8 + length])
        (start,) = (entry["data_offsets"][0] for name, entry in header.items() if name.endswith("g_idx"))
        struct.pack_into("<i", content, 8 + length + start, group)
        path.write_bytes(content)
        return arguments

    return changed


def larger_than_memory(folder: Path) -> list[str]:
    model_folder(folder, "tokenizer.json")
    write_zeros(folder / "model.safetensors", {"model.embed_tokens.weight": ("F32", (1 << 38,))})
    return [str(folder)]


def no_config(folder: Path) -> list[str]:
    shutil.copy(_EMBEDDED / "model.safetensors", folder)
    return [str(folder)]


def no_tokenizer(folder: Path) -> list[str]:
    return [str(model_folder(folder, "model.safetensors"))]


def broken(name: str, content: str) -> Arrange:
    """A whole folder but for this file."""

    def arrange(folder: Path) -> list[str]:
        model_folder(folder, "tokenizer.json", "model.safetensors")
        (folder / name).write_text(content)
        return [str(folder)]

    return arrange


def another_tokenizer(content: str | None) -> Arrange:
    def arrange(folder: Path) -> list[str]:
        if content is not None:
            (folder / "tokenizer.json").write_text(content)
        return [f"--tokenizer={folder}"]

    return arrange


def broken_keys(content: str) -> Arrange:
    def arrange(folder: Path) -> list[str]:
        (folder / "keys.yaml").write_text(content)
        return [f"--api-keys={folder / 'keys.yaml'}"]

    return arrange


def a_broken_template(folder: Path) -> list[str]:
    (folder / "chat.jinja").write_text("{% for %}")
    return [f"--chat-template={folder / 'chat.jinja'}"]


def flags(*given: str) -> Arrange:
    """The embedded model with flags that do not go with it, or with the machine."""
    return lambda folder: list(given)


_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
_FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
_MXFP4: dict[str, Any] = {"quant_method": "mxfp4"}
_OF_GPTQ: dict[str, Tensor] = {
    "qweight": ("I32", (8, 48)),
    "qzeros": ("I32", (2, 6)),
    "scales": ("F16", (2, 48)),
    "g_idx": ("I32", (64,)),
}
_OF_AWQ: dict[str, Tensor] = {
    "qweight": ("I32", (64, 6)),
    "qzeros": ("I32", (2, 6)),
    "scales": ("F16", (2, 48)),
}
_OF_FP8: dict[str, Tensor] = {"weight": ("F8_E4M3", (48, 64)), "weight_scale_inv": ("F32", (2, 2))}
_OF_PACKED: dict[str, Tensor] = {
    "weight_packed": ("I32", (48, 8)),
    "weight_scale": ("BF16", (48, 2)),
    "weight_shape": ("I64", (2,)),
}
_OF_EXPERTS: dict[str, Tensor] = {
    "experts.down_proj_blocks": ("U8", (4, 48, 2, 16)),
    "experts.down_proj_scales": ("U8", (4, 48, 2)),
}


def _compressed(weights: Mapping[str, Any], layout: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    stated = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, **weights}
    group = {"targets": ["Linear"], "weights": stated}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        **more,
    }


def _without(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {part: tensor for part, tensor in tensors.items() if part != name}


BROKEN_WEIGHTS: dict[str, tuple[Mapping[str, Any] | None, Mapping[str, Tensor], tuple[str, ...]]] = {
    "gptq, group 0": ({**_GPTQ, "group_size": 0}, _OF_GPTQ, ("group_size is 0, expected -1 or at least 1",)),
    "gptq, 3 bits": ({**_GPTQ, "bits": 3}, _OF_GPTQ, ("bits is 3, gptq is read with 2, 4 or 8",)),
    "gptq, no bits": (_GPTQ | {"bits": "four"}, _OF_GPTQ, ("bits of quantization_config is 'four'",)),
    "gptq, other bits": ({**_GPTQ, "bits": 8}, _OF_GPTQ, ("scales has shape (2, 48), expected (1, 48)",)),
    "gptq, marlin": (
        {**_GPTQ, "checkpoint_format": "marlin"},
        _OF_GPTQ,
        ("checkpoint_format is marlin, gptq is read as gptq or gptq_v2",),
    ),
    "gptq, no scales": (_GPTQ, _without(_OF_GPTQ, "scales"), (f"{_MODULE}.scales is missing",)),
    "gptq, no order": (
        {**_GPTQ, "desc_act": True},
        _without(_OF_GPTQ, "g_idx"),
        (f"{_MODULE}.g_idx is missing",),
    ),
    "gptq, order": (
        _GPTQ,
        {**_OF_GPTQ, "g_idx": ("I32", (63,))},
        ("g_idx has shape (63,), expected (64,)",),
    ),
    "gptq, zeros": (
        _GPTQ,
        {**_OF_GPTQ, "qzeros": ("I32", (2, 7))},
        ("qzeros has shape (2, 7), expected (2, 6)",),
    ),
    "gptq, both": (
        _GPTQ,
        {**_OF_GPTQ, "weight": ("F16", (48, 64))},
        (f"{_MODULE} has both weight and qweight",),
    ),
    "gptq, dynamic": (
        {**_GPTQ, "dynamic": {"-:.*up_proj": {}}},
        _OF_GPTQ,
        (f"{_MODULE} has qweight, by '-:.*up_proj' of dynamic it is not quantized",),
    ),
    "gptq, pattern": (
        {**_GPTQ, "dynamic": {"+:(": {}}},
        _OF_GPTQ,
        ("dynamic of quantization_config has pattern",),
    ),
    "gptq that is awq": (_GPTQ, _OF_AWQ, ("expected (16, 6)",)),
    "awq that is gptq": (_AWQ, _OF_GPTQ, (f"{_MODULE} has 8 inputs, group_size 32 does not divide them",)),
    "awq, gemv": ({**_AWQ, "version": "gemv"}, _OF_AWQ, ("version is gemv, awq is read as gemm",)),
    "awq, group": (
        {**_AWQ, "group_size": 48},
        _OF_AWQ,
        ("has 64 inputs, group_size 48 does not divide them",),
    ),
    "awq, no codes": (
        _AWQ,
        _without(_OF_AWQ, "qweight"),
        (f"{_MODULE}.qzeros is of gptq or awq, and belongs to",),
    ),
    "awq in full": (_AWQ, {"weight": ("F16", (48, 64))}, ("states awq, and no weight is stored so",)),
    "nvfp4": (
        _compressed({}, "nvfp4-pack-quantized"),
        _OF_PACKED,
        ("is nvfp4-pack-quantized, compressed-tensors is",),
    ),
    "2:4": (
        _compressed({}, sparsity_config={"format": "sparse-24-bitmask"}),
        _OF_PACKED,
        ("the format of sparsity_config is sparse-24-bitmask, which is not read",),
    ),
    "transforms": (_compressed({}, transform_config={"R1": {}}), _OF_PACKED, ("transform_config is stated",)),
    "packed, group 0": (_compressed({"group_size": 0}), _OF_PACKED, ("group_size is 0",)),
    "packed, 3 bits": (_compressed({"num_bits": 3}), _OF_PACKED, ("num_bits of group_0 is 3", "2, 4 or 8")),
    "packed, scales": (
        _compressed({}),
        {**_OF_PACKED, "weight_scale": ("BF16", (48, 3))},
        ("weight_scale has shape (48, 3), expected (48, 2)",),
    ),
    "packed, no scales": (
        _compressed({}),
        _without(_OF_PACKED, "weight_scale"),
        ("weight_scale is missing",),
    ),
    "packed, no zeros": (_compressed({"symmetric": False}), _OF_PACKED, ("weight_zero_point is missing",)),
    "packed, no order": (_compressed({"actorder": "group"}), _OF_PACKED, ("weight_g_idx is missing",)),
    "packed, ignored": (
        _compressed({}, ignore=["re:.*mlp"]),
        _OF_PACKED,
        (f"{_MODULE} has weight_packed, by ignore of quantization_config it is in full",),
    ),
    "packed, no group": (
        _compressed({}) | {"config_groups": {}},
        _OF_PACKED,
        (f"{_MODULE} has weight_packed, no group of config_groups",),
    ),
    "packed that is fp8": (_compressed({}), _OF_FP8, ("up_proj.weight_packed is missing, the format",)),
    "fp8 that is packed": (_FP8, _OF_PACKED, ("weight_packed is of compressed-tensors, and belongs to no",)),
    "fp8, no scale": (_FP8, _without(_OF_FP8, "weight_scale_inv"), ("weight_scale_inv is missing",)),
    "fp8, grid": (
        _FP8,
        {**_OF_FP8, "weight_scale_inv": ("F32", (2, 3))},
        ("weight_scale_inv has shape (2, 3), expected (2, 2) or (1, 1) or (48, 1)",),
    ),
    "fp8, block": ({**_FP8, "weight_block_size": [0, 32]}, _OF_FP8, ("weight_block_size is [0, 32]",)),
    "fp8, e5m2": (
        _FP8,
        {**_OF_FP8, "weight": ("F8_E5M2", (48, 64))},
        (f"{_MODULE}.weight has dtype F8_E5M2, and belongs to no weight quantized with fp8",),
    ),
    "mxfp4, scales": (
        _MXFP4,
        {**_OF_EXPERTS, "experts.down_proj_scales": ("U8", (4, 48, 3))},
        ("down_proj_scales has shape (4, 48, 3), expected (4, 48, 2)",),
    ),
    "mxfp4, blocks": (
        _MXFP4,
        {**_OF_EXPERTS, "experts.down_proj_blocks": ("U8", (4, 48, 32))},
        ("down_proj_blocks has shape (4, 48, 32)",),
    ),
    "quantized tensors": (
        None,
        _OF_GPTQ,
        ("qweight is of gptq or awq, and config.json has no quantization_config",),
    ),
    "fp8 tensors": (None, _OF_FP8, ("weight has dtype F8_E4M3, and config.json has no quantization_config",)),
}

FAILED_STARTS: dict[str, tuple[Arrange, tuple[str, ...]]] = {
    "pickles": (only_pickles, ("pytorch_model.bin", "convert them to safetensors with python -c")),
    "gguf": (only_gguf, ("has model.Q4_K_M.gguf: name the file itself to serve it",)),
    "gguf beside a config": (gguf_beside_a_config, ("name the file itself to serve it",)),
    "gguf file": (a_gguf_file, ("model.Q4_K_M.gguf is damaged: the version ends at byte 8, the file at 4",)),
    "no gguf file": (flags("models/no.gguf"), ("models/no.gguf does not exist, or is not a file",)),
    "adapter": (an_adapter, ("a LoRA adapter is not read",)),
    "truncated": (truncated, ("model.safetensors", "is truncated")),
    "no safetensors": (garbage, ("model.safetensors is not a safetensors file",)),
    "missing shard": (a_missing_shard, ("lacks 1 of 2 weight files: model-00002-of-00002.safetensors",)),
    **{
        method: (
            stating({"quantization_config": {"quant_method": method}}),
            (
                f"weights quantized with {method} are not read",
                "read as compressed-tensors (",
                "gptq (",
                "fp8 (",
            ),
        )
        for method in ("bitsandbytes", "quark", "hqq", "modelopt")
    },
    "method in the text part": (
        stating({"text_config": {"quantization_config": {"quant_method": "aqlm"}}}),
        ("quantized with aqlm are not read",),
    ),
    "algorithm": (
        stating({"quantization_config": {"quant_algo": "NVFP4"}}),
        ("quantized with NVFP4 are not read",),
    ),
    "mlx": (stating({"quantization": {"bits": 4}}), ("does not name are not read",)),
    **{
        name: (quantized(section, tensors), words)
        for name, (section, tensors, words) in BROKEN_WEIGHTS.items()
    },
    "gptq, group out of range": (
        with_group(quantized(_GPTQ, _OF_GPTQ), 2),
        (f"{_MODULE}.g_idx has group 2, there are 2",),
    ),
    "gptq, group below 0": (
        with_group(quantized(_GPTQ, _OF_GPTQ), -1),
        (f"{_MODULE}.g_idx has group -1, there are 2",),
    ),
    "packed, group out of range": (
        with_group(
            quantized(_compressed({"actorder": "group"}), {**_OF_PACKED, "weight_g_idx": ("I32", (64,))}), 9
        ),
        (f"{_MODULE}.weight_g_idx has group 9, there are 2",),
    ),
    "max-model-len": (
        flags("--max-model-len", "99999999"),
        ("--max-model-len is 99999999, the model takes 2048",),
    ),
    "cuda": (flags("--device", "cuda"), ("--device cuda: there is no CUDA device here",)),
    "fp8": (flags("--quantization=fp8"), ("--quantization fp8 needs a GPU",)),
    "kv-cache-memory": (flags("--kv-cache-memory=900TiB"), ("--kv-cache-memory is 921600.0 GiB, more than",)),
    "memory": (larger_than_memory, ("take 1024.0 GiB, more than the", "GiB free here")),
    "no config": (no_config, ("is not a model folder: it has no config.json",)),
    "no folder": (flags("./no-such-folder"), ("no-such-folder is not a folder",)),
    "config": (broken("config.json", "{"), ("config.json cannot be read",)),
    "no tokenizer": (no_tokenizer, ("has no tokenizer.json: name one with --tokenizer",)),
    "tokenizer.json": (broken("tokenizer.json", "{}"), ("tokenizer.json is not a tokenizer",)),
    "unknown tokenizer": (
        broken("tokenizer.json", '{"model": {}}'),
        ("the tokenizer.json of", "cannot be read: "),
    ),
    "tokenizer_config.json": (
        broken("tokenizer_config.json", "[]"),
        ("tokenizer_config.json is not a JSON object",),
    ),
    "generation_config.json": (
        broken("generation_config.json", "{"),
        ("generation_config.json is not JSON",),
    ),
    "unknown --tokenizer": (another_tokenizer("{}"), ("--tokenizer ", "cannot be read: ")),
    "empty --tokenizer": (another_tokenizer(None), ("--tokenizer ", "has no tokenizer.json")),
    "tokenizer": (flags("--tokenizer=/nowhere"), ("--tokenizer /nowhere does not exist",)),
    "no template": (flags("--chat-template=/nowhere"), ("--chat-template /nowhere cannot be read: No such",)),
    "template": (a_broken_template, ("--chat-template", "the chat template cannot be used")),
    "policy": (flags("--scheduling-policy=slowest"), ("--scheduling-policy is 'slowest'",)),
    "scheduler": (flags("--scheduler-class=mine"), ("--scheduler-class is 'mine'",)),
    "proposer": (flags("--speculative=mine"), ("--speculative is 'mine'",)),
    "plugin": (flags("--plugins=mine"), ("--plugins is 'mine', it has to be one of all",)),
    "heads": (flags("-tp", "3"), ("--tensor-parallel-size 3 does not divide the model's 4 attention heads",)),
    "stages": (flags("-pp", "9"), ("--pipeline-parallel-size is 9, the model has 4 layers",)),
    "ranks": (flags("-pp", "2", "--model-impl=transformers"), ("needs a native model, and --model-impl is",)),
    "chunks": (
        llama4({}, "--block-size=48"),
        ("--block-size is 48, it must divide 8192: the model attends in chunks",),
    ),
    "smaller chunks": (
        llama4({"attention_chunk_size": 24, "layer_types": ["chunked_attention", "full_attention"] * 2}),
        ("--block-size is 16, it must divide 24: the model attends in chunks",),
    ),
    "chunks of layers with rope": (
        llama4({"attention_chunk_size": 24, "no_rope_layers": [0, 0, 1, 0]}),
        ("--block-size is 16, it must divide 24: the model attends in chunks",),
    ),
    "encoder-decoder": (stating({"is_encoder_decoder": True}), ("is an encoder-decoder",)),
    "prefill-first": (
        flags("--scheduling-policy=prefill-first", "--no-enable-chunked-prefill"),
        ("--scheduling-policy prefill-first needs --enable-chunked-prefill",),
    ),
    "whole prompts": (
        flags("--no-enable-chunked-prefill", "--max-num-batched-tokens=64", "--max-model-len=65"),
        ("--max-num-batched-tokens is 64", "at least --max-model-len, 65"),
    ),
    "sched-trace": (
        flags("--sched-trace-path=/nowhere/a.jsonl"),
        ("--sched-trace-path is /nowhere/a.jsonl", "a file in a folder that exists"),
    ),
    "former flag": (flags("--record-decisions=a.json.gz"), ("it is --sched-trace-path, whose file",)),
    "short key": (
        broken_keys("- {name: a, role: client, key: short}"),
        ("keys.yaml: entry 1 (a): key has 5 characters", "an entry with its sha256"),
    ),
    "no keys": (flags("--api-keys=/nowhere"), ("api_keys /nowhere cannot be read",)),
    "certificate": (
        flags("--ssl-certfile=/nowhere", "--ssl-keyfile=/nowhere"),
        ("/nowhere",),
    ),
    "peer key": (flags("--peer-api-key-file=/nowhere"), ("/nowhere",)),
    "revision": (flags("--revision=main"), ("revision is main, but",)),
}


_QWEN: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
}
_BAMBA: dict[str, Any] = {
    "model_type": "bamba",
    "num_hidden_layers": 2,
    "layer_types": None,
    "hidden_size": 32,
    "mamba_n_heads": 8,
    "mamba_d_head": "auto",
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}


def with_states(config: Mapping[str, Any], *flags: str, num_channels: int) -> Arrange:
    """A folder of a model with these layers, one of which keeps a state."""

    def arrange(folder: Path) -> list[str]:
        model_folder(folder, "tokenizer.json", config=config)
        name = "model.layers.0.mixer.conv1d.weight"
        write_zeros(folder / "model.safetensors", {name: ("F32", (num_channels, 1, 4))})
        return [str(folder), *flags]

    return arrange


def qwen(*flags: str, **changes: object) -> Arrange:
    return with_states({**_QWEN, **changes}, *flags, num_channels=96)


def bamba(**changes: object) -> Arrange:
    return with_states({**_BAMBA, **changes}, num_channels=128)


MODELS_WITH_STATES: dict[str, tuple[Arrange, tuple[str, ...]]] = {
    "indexed attention": (
        stating({"model_type": "deepseek_v32", "index_topk": 64}),
        ("has layers of kind indexed_attention, which are not served",),
    ),
    "conv": (
        stating({"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 2}),
        ("has layers of kind conv, which are not served",),
    ),
    "another mixer": (
        stating({"model_type": "minimax", "layer_types": ["linear_attention", "full_attention"] * 2}),
        ("has layers of kind linear_attention, whose states are not served for model type minimax",),
    ),
    **{
        name: (stating({"model_type": name}), (f"is a {name}, whose states are not served",))
        for name in ("jamba", "mamba", "kimi_linear")
    },
    "no kinds": (
        qwen(layer_types=["linear_attention", 3]),
        ("layer_types is ['linear_attention', 3], expected a list of kinds",),
    ),
    "kinds of fewer layers": (
        qwen(num_hidden_layers=4),
        ("layer_types has 2 kinds, num_hidden_layers is 4",),
    ),
    "heads": (
        qwen(linear_num_key_heads=3),
        ("linear_num_key_heads is 3, which does not divide linear_num_value_heads, 4",),
    ),
    "groups": (bamba(mamba_n_groups=3), ("mamba_n_groups is 3, which does not divide mamba_n_heads, 8",)),
    "state size": (bamba(mamba_d_state=0), ("mamba_d_state is 0, expected at least 1",)),
    "convolution": (
        qwen(linear_conv_kernel_dim="4"),
        ("linear_conv_kernel_dim is '4', expected at least 1",),
    ),
    "width of a head": (
        bamba(mamba_d_head=16),
        ("mamba_n_heads is 8, times heads of 16 it is not mamba_expand times hidden_size, 64",),
    ),
    "channels": (
        qwen(linear_key_head_dim=16),
        ("conv1d.weight has shape (96, 1, 4), by config.json (128, 1, 4)",),
    ),
    "states and ranks": (
        with_states(_BAMBA, "--tensor-parallel-size=2", num_channels=128),
        ("--tensor-parallel-size is 2, a bamba, whose layers keep states, takes 1",),
    ),
    "heads and ranks": (
        with_states({**_QWEN, "linear_num_value_heads": 6}, "--tensor-parallel-size=4", num_channels=128),
        ("--tensor-parallel-size 4 does not divide linear_num_value_heads, 6",),
    ),
    "states and stages": (
        qwen("-pp", "2"),
        ("--pipeline-parallel-size is 2, a model whose layers keep states takes 1",),
    ),
    "states and drafts": (
        qwen("--speculative=ngram"),
        ("--speculative is ngram, a model whose layers keep states takes off",),
    ),
    "memory of states": (
        with_states(
            {**_QWEN, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_key_head_dim": 128},
            "--state-cache-memory=32MiB",
            "--max-num-seqs=16",
            num_channels=4608,
        ),
        ("--state-cache-memory is 32.0 MiB, --max-num-seqs 16 needs 17 states of 2.1 MiB, 34.9 MiB",),
    ),
    "states and weights": (
        with_states(
            {**_BAMBA, "mamba_n_groups": 1, "mamba_d_state": 1 << 24},
            num_channels=64 + (2 << 24),
        ),
        ("--max-num-seqs is 256, which needs 257 states of", "and beside the weights", "free here"),
    ),
}


@pytest.fixture
def no_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **options: object) -> None:
        raise AssertionError(f"a process was started: {given}")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(start_check, "find_cuda_devices", lambda: ((), "no driver"))


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize(
    ("arrange", "words"),
    [*FAILED_STARTS.values(), *MODELS_WITH_STATES.values()],
    ids=[*FAILED_STARTS, *MODELS_WITH_STATES],
)
def test_a_failed_start_is_its_cause_in_one_line_and_no_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrange: Arrange, words: tuple[str, ...]
) -> None:
    assert app(["serve", "--port=0", *arrange(tmp_path)], standalone_mode=False) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("triptych serve: ")
    assert all(word in line for word in words), line


# The command, and then what it took.
MEASURED = """
import atexit, os, runpy, sys
def show():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    print(int(status["VmHWM"].split()[0]), sum(os.times()[:2]))
atexit.register(show)
sys.argv[0] = "triptych"
runpy.run_module("triptych_cli.cli", run_name="__main__")
"""


def test_broken_weights_are_refused_at_once_and_in_little_memory(tmp_path: Path) -> None:
    section, tensors, words = BROKEN_WEIGHTS["gptq, group 0"]
    arguments = quantized(section, tensors)(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "serve", "--port=0", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line == f"triptych serve: {tmp_path}: {words[0]}"
    peak_kib, cpu_s = map(float, done.stdout.split())
    assert peak_kib < 400 * 1024
    assert cpu_s < 2


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize("arguments", [("serve", "--port=0"), ("frontend", "--engine=127.0.0.1:1")])
def test_a_key_of_vllm_without_credentials_is_no_open_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(cli_module, "_ENVIRONMENT", {"VLLM_API_KEY": "secret", "VLLM_LOGGING_LEVEL": "INFO"})
    assert app(arguments, standalone_mode=False) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"triptych {arguments[0]}: VLLM_API_KEY is set, which is not read here")
    assert "Set TRIPTYCH_API_KEY, or a file of keys with --api-keys" in line


@pytest.mark.usefixtures("no_process_starts")
def test_variables_of_vllm_are_a_warning_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"VLLM_API_KEY": "secret", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_NEW": "1", "VLLM_EMPTY": ""}
    monkeypatch.setattr(cli_module, "_ENVIRONMENT", variables)
    monkeypatch.setenv("TRIPTYCH_API_KEY", "triptych-0123456789abcdef")
    assert app(["serve", "--port=0", "./no-such-folder"], standalone_mode=False) == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        "triptych serve: variables of vLLM have no effect here: VLLM_API_KEY (TRIPTYCH_API_KEY),"
        " VLLM_LOGGING_LEVEL (--log-level), VLLM_NEW"
    )


@pytest.mark.usefixtures("no_process_starts")
def test_a_port_that_is_taken_is_refused_before_any_process(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert app(["serve", f"--port={port}"], standalone_mode=False) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"port {port} is in use by pid {os.getpid()}" in line


@pytest.mark.usefixtures("no_process_starts")
def test_a_model_that_the_disk_has_no_room_for_is_refused_before_any_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cause = "org/name needs 90.0 GiB in /cache, which has 1.0 GiB free"

    def find_model(name: str, **options: object) -> Path:
        raise CheckpointError(cause)

    monkeypatch.setattr(serve_module, "find_model", find_model)
    assert app(["serve", "org/name"], standalone_mode=False) == 2
    assert capsys.readouterr().err == f"triptych serve: {cause}\n"


@pytest.mark.parametrize("length", [1 << 30, 1 << 63])
def test_a_damaged_gguf_file_is_refused_with_little_memory(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, length))
    limited = ("sh", "-c", f'ulimit -d {400 * 1024}; exec "$@"', "sh")
    command = (sys.executable, "-m", "triptych_cli.cli", "serve", "--port=0", str(path))
    finished = subprocess.run((*limited, *command), capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 2
    [line] = finished.stderr.splitlines()
    assert line.startswith(f"triptych serve: {path} is damaged: a key of metadata has {length} bytes")


async def test_an_engine_refuses_the_same_in_its_first_line(tmp_path: Path) -> None:
    outcome = await triptych("engine", *only_pickles(tmp_path))
    assert outcome.exit_code == 2
    [line] = outcome.err.splitlines()
    assert line.startswith(f"triptych engine: {tmp_path} has weights only as pytorch_model.bin")


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"text_config": {"max_position_embeddings": 50}}, 50),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 4.0}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 400),
        (
            {
                "max_position_embeddings": 400,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 100,
                },
            },
            400,
        ),
    ],
)
def test_a_length_is_refused_beyond_what_the_config_states(
    tmp_path: Path, config: dict[str, Any], limit: int
) -> None:
    model_folder(tmp_path, "tokenizer.json", "model.safetensors", config=config)
    check_start(EngineConfig(str(tmp_path), max_model_len=limit, device="cpu"))
    with pytest.raises(ValueError, match=f"--max-model-len is {limit + 1}, the model takes {limit}$"):
        check_start(EngineConfig(str(tmp_path), max_model_len=limit + 1, device="cpu"))


@pytest.mark.parametrize("config", [{"no_rope_layers": [0] * 4}, {"no_rope_layer_interval": 1}])
def test_chunks_count_only_where_a_layer_attends_in_them(tmp_path: Path, config: dict[str, Any]) -> None:
    (folder,) = llama4({"attention_chunk_size": 24, **config})(tmp_path)
    check_start(EngineConfig(folder, device="cpu"))


def test_each_engine_on_a_cpu_needs_room_for_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stored in half the width that they are loaded in.
    num_bytes = 2 * (_EMBEDDED / "model.safetensors").stat().st_size
    monkeypatch.setattr(start_check, "free_host_bytes", lambda: (2 * num_bytes, "free"))
    config = EngineConfig(str(_EMBEDDED), device="cpu")
    check_start(config, num_engines=2)
    with pytest.raises(CheckpointError, match="for each of 3 engines, more than"):
        check_start(config, num_engines=3)


def test_ranks_divide_the_weights_over_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    # Stored in half the width that they are loaded in.
    num_bytes = 2 * (_EMBEDDED / "model.safetensors").stat().st_size
    monkeypatch.setattr(start_check, "find_cuda_devices", lambda: ((num_bytes // 2 + 1,) * 2, ""))
    check_start(EngineConfig(str(_EMBEDDED), tensor_parallel_size=2))
    with pytest.raises(CheckpointError, match=r"MiB of the GPU$"):
        check_start(EngineConfig(str(_EMBEDDED)))
    with pytest.raises(ConfigError, match="need 4 GPUs, and there are 2"):
        check_start(EngineConfig(str(_EMBEDDED), tensor_parallel_size=2, pipeline_parallel_size=2))
