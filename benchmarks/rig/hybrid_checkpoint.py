"""A Qwen3.5 with random weights: a Hugging Face folder, and the same weights as a GGUF file for llama.cpp.

    python -m benchmarks.rig.hybrid_checkpoint FOLDER

writes FOLDER and FOLDER.gguf. It has half the width and half the layers of Qwen3.5-0.8B and 104 million
parameters. The file has no tokenizer.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from benchmarks.checkpoint import learned_tokenizer, widen

_ROTATED = 0.25  # of each head
# Of the rotated pairs: equal for a text, but the architecture has them.
_ROPE_SECTIONS = (11, 11, 10, 0)
_FULL_ATTENTION_INTERVAL = 4
# States last for 10 to 1,000 tokens: with the usual values most forget at once.
_DECAYS = (1e-3, 1e-1)


@dataclass(frozen=True, slots=True)
class HybridShape:
    """The shape of the model. Of each four layers one has attention, the others the gated delta rule."""

    hidden_size: int = 512
    num_layers: int = 12
    num_heads: int = 4
    num_kv_heads: int = 1
    head_dim: int = 256
    num_delta_heads: int = 8  # of keys as of values
    delta_head_dim: int = 128
    intermediate_size: int = 1_792
    vocabulary_size: int = 81_920
    max_position_embeddings: int = 4_096


def make_hybrid(
    folder: Path,
    shape: HybridShape,
    *,
    dtype: torch.dtype,
    seed: int,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> int:
    """Write weights drawn from the seed, and a tokenizer; returns the number of parameters."""
    tokenizer = tokenizer or learned_tokenizer(seed)
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=shape.num_delta_heads,
        linear_num_value_heads=shape.num_delta_heads,
        linear_key_head_dim=shape.delta_head_dim,
        linear_value_head_dim=shape.delta_head_dim,
        layer_types=[
            "linear_attention" if (index + 1) % _FULL_ATTENTION_INTERVAL else "full_attention"
            for index in range(shape.num_layers)
        ],
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config)
    widen(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(*map(math.log, _DECAYS))
    model = model.to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def write_gguf(folder: Path, path: Path) -> None:
    """Write the checkpoint as llama.cpp's conversion does: matrices in their dtype, all else in fp32."""
    config = Qwen3_5TextConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.QWEN35])
    _add_metadata(writer, config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN35, config.num_hidden_layers)
    for name, weight in load_file(folder / "model.safetensors").items():
        stem, _, end = name.rpartition(".")
        if end == "A_log":
            _add(writer, names.get_name(name), -weight.float().exp())
        elif end == "dt_bias":
            _add(writer, f"{names.get_name(f'{stem}.dt_proj')}.bias", weight.float())
        else:
            _add(writer, f"{names.get_name(stem)}.{end}", _as_files_have_it(stem, weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: gguf.GGUFWriter, config: PreTrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * _ROTATED))
    writer.add_rope_dimension_sections(list(_ROPE_SECTIONS))
    writer.add_full_attention_interval(_FULL_ATTENTION_INTERVAL)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    # Ids alone.
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config.vocab_size)


def _as_files_have_it(stem: str, weight: Tensor) -> Tensor:
    if stem.endswith("conv1d"):
        return weight.float().squeeze(1)
    if stem.endswith("norm"):
        # All but the norm of a recurrence multiply by 1 more than the checkpoint has.
        return weight.float() + (0 if stem.endswith("linear_attn.norm") else 1)
    return weight


def _add(writer: gguf.GGUFWriter, name: str | None, weight: Tensor) -> None:
    assert name is not None
    if weight.dtype == torch.bfloat16:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, gguf.quants.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, weight.numpy())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rig.hybrid_checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    num_parameters = make_hybrid(options.folder, HybridShape(), dtype=dtype, seed=options.seed)
    path = options.folder.with_name(f"{options.folder.name}.gguf")
    write_gguf(options.folder, path)
    print(f"{options.folder} and {path}: {num_parameters:,} parameters")


if __name__ == "__main__":
    main()
