"""The weights of a checkpoint as llama.cpp reads them."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

from benchmarks.rig.hybrid_checkpoint import HybridShape, make_hybrid, write_gguf
from tools.tiny_model.tokenizer import learn_tokenizer

_OF_ALL = (
    "attn_norm.weight",
    "post_attention_norm.weight",
    *(f"ffn_{name}.weight" for name in ("gate", "up", "down")),
)
_OF_ATTENTION = tuple(f"attn_{name}.weight" for name in ("q", "k", "v", "output", "q_norm", "k_norm"))
_OF_STATES = (
    "attn_qkv.weight", "attn_gate.weight", "ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_beta.weight",
    "ssm_alpha.weight", "ssm_norm.weight", "ssm_out.weight",
)  # fmt: skip


def test_a_file_has_the_tensors_of_its_architecture_with_the_numbers_of_the_folder(tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "model.gguf"
    shape = HybridShape(
        hidden_size=32,
        num_layers=4,
        num_heads=2,
        head_dim=16,
        num_delta_heads=2,
        delta_head_dim=8,
        intermediate_size=64,
        vocabulary_size=1_024,
    )
    make_hybrid(folder, shape, dtype=torch.bfloat16, seed=0, tokenizer=learn_tokenizer(["a text"]))
    write_gguf(folder, path)
    reader = gguf.GGUFReader(path)
    tensors = {
        each.name: torch.tensor(gguf.quants.dequantize(each.data, each.tensor_type))
        for each in reader.tensors
    }
    of_layers = {
        f"blk.{layer}.{name}"
        for layer in range(4)
        for name in (*_OF_ALL, *(_OF_ATTENTION if layer == 3 else _OF_STATES))
    }
    assert set(tensors) == {"token_embd.weight", "output_norm.weight", *of_layers}
    weights = {name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()}
    layer = "model.layers.0."
    for name, expected in {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "blk.3.attn_q.weight": weights["model.layers.3.self_attn.q_proj.weight"],
        "blk.3.attn_k_norm.weight": weights["model.layers.3.self_attn.k_norm.weight"] + 1,
        "blk.0.attn_norm.weight": weights[f"{layer}input_layernorm.weight"] + 1,
        "blk.0.ssm_norm.weight": weights[f"{layer}linear_attn.norm.weight"],
        "blk.0.ssm_a": -weights[f"{layer}linear_attn.A_log"].exp(),
        "blk.0.ssm_conv1d.weight": weights[f"{layer}linear_attn.conv1d.weight"][:, 0],
    }.items():
        assert torch.equal(tensors[name], expected), name
