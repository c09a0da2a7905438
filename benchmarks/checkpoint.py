"""Small models with random weights, written as Hugging Face folders, for benchmarks that bring no model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tools.tiny_model.corpus import training_examples
from tools.tiny_model.tokenizer import END, PAD, learn_tokenizer, token_id

_NUM_TOKENIZER_EXAMPLES = 4_000
_EMBEDDING_GAIN = 4.0
_LINEAR_GAIN = 6.0


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """The shape of the model; the defaults make about 15 million parameters."""

    hidden_size: int = 320
    num_layers: int = 8
    num_heads: int = 10
    num_kv_heads: int = 5
    intermediate_size: int = 864
    vocabulary_size: int = 16_384
    max_position_embeddings: int = 2_048


def make_checkpoint(
    folder: Path,
    shape: CheckpointShape,
    *,
    dtype: torch.dtype,
    seed: int,
    tokenizer: PreTrainedTokenizerFast | None = None,
    is_varied: bool = False,
) -> int:
    """Write weights drawn from the seed, and a tokenizer; returns the number of parameters.

    The tokenizer's vocabulary is smaller than the model's: the rest of the ids decode to nothing.
    is_varied: what the model says depends on what was said before; else all tokens are nearly equally likely.
    """
    tokenizer = tokenizer or learned_tokenizer(seed)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=shape.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    if is_varied:
        widen(model)
    model = model.to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def make_mixture(folder: Path, *, seed: int) -> int:
    """Write a Mixtral of eight experts with random fp32 weights; returns the number of parameters.

    Its weights are drawn so wide that what it says varies from place to place.
    """
    tokenizer = learned_tokenizer(seed)
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=2_048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=2_048,
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )
    model = MixtralForCausalLM(config)
    widen(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def widen(model: PreTrainedModel) -> None:
    """Make its matrices so wide that what it says depends on what was said before."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                is_embedding = "embed" in name or "lm_head" in name
                parameter.mul_(_EMBEDDING_GAIN if is_embedding else _LINEAR_GAIN)


def learned_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    examples = itertools.islice(training_examples(seed), _NUM_TOKENIZER_EXAMPLES)
    return learn_tokenizer(turn.text for example in examples for turn in example.turns)
