"""Tiny checkpoints of many architectures, made with transformers, whose greedy streams are varied."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5ForConditionalGeneration,
)

VOCAB_SIZE = 160
MAX_POSITION = 160
_EMBEDDING = re.compile("embed|wte|lm_head|router")
_POSITION = re.compile("embed_positions|wpe")

# How wide the weights of embeddings and others are, where the usual ones let streams fall into a loop.
_SPREADS = {
    "bart": (0.3, 0.6),
    "bigbird_pegasus": (0.3, 0.6),
    "gemma3": (0.1, 0.8),
    "gemma3n": (0.05, 1.0),
    "olmo2": (1.0, 0.3),
    "olmo3": (1.0, 0.3),
    "phi": (0.1, 0.8),
    "qwen3": (1.0, 0.3),
    "qwen3_moe": (0.1, 0.5),
    "starcoder2": (0.1, 0.5),
}

_BLOCK: dict[str, object] = {
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
}
_GPT: dict[str, object] = {
    "vocab_size": VOCAB_SIZE,
    "n_positions": MAX_POSITION,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}
_SEQ2SEQ = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITION,
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SLIDING_AND_FULL = {"layer_types": ["sliding_attention", "full_attention"]}
_LATENT = {
    "num_key_value_heads": 4,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
}
_TOP_2 = {"num_experts_per_tok": 2}
_MAMBA: dict[str, object] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
_DELTA: dict[str, object] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_DEEPSEEK: dict[str, object] = {
    **_LATENT,
    **_TOP_2,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

# Per family: its model type at transformers, and what its config has beside or in place of _BLOCK.
_OF_BLOCKS: dict[str, tuple[str, dict[str, object]]] = {
    "afmoe": (
        "afmoe",
        {"sliding_window": 7, "num_experts": 8, "moe_intermediate_size": 16, **_TOP_2, **_SLIDING_AND_FULL},
    ),
    "bamba": ("bamba", {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "bert": ("bert", {"is_decoder": False}),
    "cohere2": ("cohere2", {"sliding_window": 7, "logit_scale": 1.0, **_SLIDING_AND_FULL}),
    "deepseek_v2": ("deepseek_v2", {**_DEEPSEEK, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", _DEEPSEEK),
    "diffllama": ("diffllama", {}),
    "doge": ("doge", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "exaone4": ("exaone4", {"sliding_window": 7, **_SLIDING_AND_FULL}),
    "falcon_h1": (
        "falcon_h1",
        {**_MAMBA, "mamba_d_ssm": 64, "embedding_multiplier": 2.0, "ssm_in_multiplier": 0.7},
    ),
    "gemma": ("gemma", {}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": 7,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 7, "tie_word_embeddings": False, **_SLIDING_AND_FULL}),
    "gemma3n": (
        "gemma3n_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 7,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [64] * 4,
        },
    ),
    "gemma4": (
        "gemma4_text",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "sliding_window": 7,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "glm4": ("glm4", {}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "sliding_window": 9, "rope_parameters": _ROPE, **_TOP_2},
    ),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
        },
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, **_TOP_2}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA,
            **_TOP_2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "num_local_experts": 4,
            "shared_intermediate_size": 32,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "llama": ("llama", {"tie_word_embeddings": True}),
    "longcat_flash": (
        "longcat_flash",
        {
            **_LATENT,
            "num_hidden_layers": 2,
            "num_layers": 1,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "mimo_v2": (
        "mimo_v2_flash",
        {
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"],
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "v_head_dim": 8,
            **_TOP_2,
        },
    ),
    "mistral": ("mistral", {"sliding_window": 11}),
    "mixtral": ("mixtral", {"num_local_experts": 4, **_TOP_2}),
    "nemotron": ("nemotron", {}),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 7, **_SLIDING_AND_FULL}),
    "olmoe": ("olmoe", {"num_experts": 4, **_TOP_2}),
    "opt": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"sliding_window": 13}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen2_sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_5": ("qwen3_5_text", {**_DELTA, "tie_word_embeddings": True}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {
            **_DELTA,
            **_TOP_2,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16, **_TOP_2}),
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA,
            **_TOP_2,
            "num_experts": 4,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "recurrent_gemma": ("recurrent_gemma", {"lru_width": 32, "attention_window_size": 11}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "llama4": (
        "llama4_text",
        {
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 12,
            "no_rope_layers": [1, 0],
            "floor_scale": 16,
            "moe_layers": [1],
            "num_local_experts": 4,
            **_TOP_2,
        },
    ),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 9}),
}
_OTHERS: dict[str, tuple[str, dict[str, object]]] = {
    "bart": ("bart", {**_SEQ2SEQ, "is_decoder": True, "is_encoder_decoder": False}),
    "bigbird_pegasus": ("bigbird_pegasus", {**_SEQ2SEQ, "is_decoder": True, "is_encoder_decoder": False}),
    "bloom": ("bloom", {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "ctrl": (
        "ctrl",
        {
            "vocab_size": VOCAB_SIZE,
            "n_positions": MAX_POSITION,
            "n_embd": 32,
            "dff": 64,
            "n_layer": 2,
            "n_head": 4,
        },
    ),
    "falcon": (
        "falcon",
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "gpt2": ("gpt2", _GPT),
    "gptj": ("gptj", {**_GPT, "n_positions": 64, "rotary_dim": 4}),
    "mamba2": (
        "mamba2",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
            "state_size": 8,
        },
    ),
    "moshi": ("moshi", {**_BLOCK, "sliding_window": 9, "ffn_dim": 64}),
    "mpt": (
        "mpt",
        {
            "vocab_size": VOCAB_SIZE,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "expansion_ratio": 2,
            "max_seq_len": MAX_POSITION,
        },
    ),
    "t5": (
        "t5",
        {"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    ),
}


def make_config(family: str, **changes: object) -> PreTrainedConfig:
    if family in _OF_BLOCKS:
        model_type, extra = _OF_BLOCKS[family]
        options = {**_BLOCK, **extra}
    else:
        model_type, options = _OTHERS[family]
    config: PreTrainedConfig = CONFIG_MAPPING[model_type](**{**options, **changes})
    return config


def make_checkpoint(
    family: str, folder: Path, *, max_shard_size: str = "50GB", **changes: object
) -> PreTrainedModel:
    """Write an fp32 checkpoint of `family` to `folder` and return the model it was written from.

    changes: of its config.
    """
    torch.manual_seed(3)
    config = make_config(family, **changes)
    config.dtype = torch.float32
    config._attn_implementation = "eager"
    make = T5ForConditionalGeneration if family == "t5" else AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                # Wide weights keep greedy streams from falling into a loop.
                parameter.normal_(0.0, _spread(family, name))
            elif name.endswith("sinks"):
                parameter.normal_()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def _spread(family: str, name: str) -> float:
    # Where positions are learned, they alone distinguish equal tokens.
    if _POSITION.search(name):
        return 0.4
    of_embeddings, of_others = _SPREADS.get(family, (0.1, 0.3))
    return of_embeddings if _EMBEDDING.search(name) else of_others
