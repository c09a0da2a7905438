"""Folders of adapters as PEFT saves them, and checkpoints with an adapter's additions in their weights."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine_svc.model.checkpoints import make_checkpoint

MLP_AND_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def weights_of(model: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint of one file."""
    return load_file(model / "model.safetensors")


def write_adapter(
    folder: Path,
    model: Path,
    *,
    seed: int,
    rank: int = 8,
    modules: Sequence[str] = MLP_AND_ATTENTION,
    spread: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """An adapter of these modules, by the ends of their names, that changes what the model says."""
    generator = torch.Generator().manual_seed(seed)
    content = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": list(modules), **config,
    }  # fmt: skip
    tensors: dict[str, Tensor] = {}
    for name, weight in weights_of(model).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in modules or weight.ndim != 2:
            continue
        own = _stated(content.get("rank_pattern"), module, rank)
        outputs, inputs = weight.shape
        if config.get("fan_in_fan_out") or module.endswith("embed_tokens"):
            outputs, inputs = inputs, outputs
        down = torch.randn(own, inputs, generator=generator) / math.sqrt(inputs)
        up = torch.randn(outputs, own, generator=generator) * spread / math.sqrt(own)
        names = ("lora_A.weight", "lora_B.weight")
        if module.endswith("embed_tokens"):
            names, down = ("lora_embedding_A", "lora_embedding_B"), down * math.sqrt(inputs)
        prefix = f"base_model.model.{module}."
        tensors |= {prefix + names[0]: down.to(dtype), prefix + names[1]: up.to(dtype)}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


def write_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """The model with the adapter's additions in its weights, in fp32."""
    shutil.copytree(model, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = weights_of(model)
    additions = load_file(adapter / "adapter_model.safetensors")
    for name, up in additions.items():
        match = re.fullmatch(r"base_model\.model\.(.*)\.(lora_B\.weight|lora_embedding_B)", name)
        if match is None:
            continue
        module = match[1]
        down = additions[name.replace("lora_B", "lora_A").replace("embedding_B", "embedding_A")]
        alpha = _stated(config.get("alpha_pattern"), module, config["lora_alpha"])
        scale = alpha / (math.sqrt(len(down)) if config.get("use_rslora") else len(down))
        added = scale * up.double() @ down.double()
        if config.get("fan_in_fan_out") or module.endswith("embed_tokens"):
            added = added.t()
        weight = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = (weight.double() + added).to(weight.dtype).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_text_part(model: Path) -> None:
    """Have the checkpoint of a decoder be one of a model of text and images, whose text part it is."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    whole = {
        "model_type": config["model_type"].removesuffix("_text"),
        "text_config": config,
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    path.write_text(json.dumps(whole))
    tensors = {
        re.sub(r"^model\.", "model.language_model.", name): tensor
        for name, tensor in weights_of(model).items()
    }
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def rename_modules(adapter: Path, first: str, new: str) -> None:
    """Change what the names of an adapter's modules begin with."""
    path = adapter / "adapter_model.safetensors"
    tensors = {
        re.sub(rf"^(base_model\.model\.){re.escape(first)}", rf"\1{new}", name): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)


def _stated(pattern: dict[str, Any] | None, module: str, default: Any) -> Any:
    return next((value for key, value in (pattern or {}).items() if module.endswith(key)), default)


def write_model(family: str, folder: Path) -> Path:
    """A tiny checkpoint of a family."""
    make_checkpoint(family, folder)
    return folder
