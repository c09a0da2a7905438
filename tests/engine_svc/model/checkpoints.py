"""Tiny checkpoints of many architectures, made with transformers, whose greedy streams are varied."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTJConfig,
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB_SIZE = 160
MAX_POSITION = 160
_EMBEDDING = re.compile("embed|wte|wpe|lm_head|router")


def _block(**extra: object) -> dict[str, object]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": MAX_POSITION,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **extra,
    }


def _config(family: str) -> PreTrainedConfig:
    experts = {"num_experts_per_tok": 2}
    match family:
        case "llama":
            return LlamaConfig(**_block(tie_word_embeddings=True))
        case "qwen2":
            return Qwen2Config(**_block(tie_word_embeddings=False))
        case "gpt2":
            return GPT2Config(vocab_size=VOCAB_SIZE, n_positions=MAX_POSITION, n_embd=32, n_layer=2, n_head=4)
        case "mistral":
            return MistralConfig(**_block(sliding_window=11))
        case "gemma3":
            layers = ["sliding_attention", "full_attention"]
            return Gemma3TextConfig(**_block(sliding_window=7, layer_types=layers, tie_word_embeddings=False))
        case "gemma2":
            return Gemma2Config(
                **_block(
                    sliding_window=7,
                    query_pre_attn_scalar=8,
                    attn_logit_softcapping=5.0,
                    tie_word_embeddings=False,
                )
            )
        case "gpt_oss":
            rope = {"rope_type": "default", "rope_theta": 10000.0}
            extra = {"num_local_experts": 4, "sliding_window": 9, "rope_parameters": rope, **experts}
            return GptOssConfig(**_block(**extra))
        case "mixtral":
            return MixtralConfig(**_block(num_local_experts=4, **experts))
        case "qwen3_moe":
            return Qwen3MoeConfig(**_block(num_experts=4, moe_intermediate_size=16, **experts))
        case "phi3":
            return Phi3Config(**_block())
        case "deepseek_v3":
            heads = {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
            router = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16}
            ranks = {"q_lora_rank": 16, "kv_lora_rank": 16}
            return DeepseekV3Config(**_block(**heads, **router, **ranks, **experts))
        case "opt":
            return OPTConfig(**_block(ffn_dim=64, word_embed_proj_dim=32))
        case "falcon":
            return FalconConfig(
                vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
            )
        case "bloom":
            return BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4)
        case "gptj":
            return GPTJConfig(
                vocab_size=VOCAB_SIZE, n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4
            )
        case "mamba2":
            return Mamba2Config(
                vocab_size=VOCAB_SIZE,
                hidden_size=32,
                num_hidden_layers=2,
                num_heads=8,
                head_dim=8,
                n_groups=1,
                state_size=8,
            )
        case "t5":
            return T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
        case "bert":
            return BertConfig(**_block(is_decoder=False))
    raise ValueError(f"unknown family {family!r}")


def make_checkpoint(family: str, folder: Path, *, max_shard_size: str = "50GB") -> PreTrainedModel:
    """Write an fp32 checkpoint of `family` to `folder` and return the model it was written from."""
    torch.manual_seed(3)
    config = _config(family)
    config.dtype = torch.float32
    config._attn_implementation = "eager"
    make = T5ForConditionalGeneration if family == "t5" else AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                # Wide weights keep greedy streams from falling into a loop.
                parameter.normal_(0.0, 0.1 if _EMBEDDING.search(name) else 0.3)
            elif name.endswith("sinks"):
                parameter.normal_()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
