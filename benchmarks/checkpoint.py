"""A small Llama with random weights, written as a Hugging Face folder, for benchmarks that bring no model."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from launcher.tiny_model.corpus import training_examples
from launcher.tiny_model.tokenizer import END, PAD, learn_tokenizer, token_id

_NUM_TOKENIZER_EXAMPLES = 4_000


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


def make_checkpoint(folder: Path, shape: CheckpointShape, *, dtype: torch.dtype, seed: int) -> int:
    """Write weights drawn from the seed, and a tokenizer; returns the number of parameters.

    The tokenizer's vocabulary is smaller than the model's: the rest of the ids decode to nothing.
    """
    examples = itertools.islice(training_examples(seed), _NUM_TOKENIZER_EXAMPLES)
    tokenizer = learn_tokenizer(turn.text for example in examples for turn in example.turns)
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
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()
