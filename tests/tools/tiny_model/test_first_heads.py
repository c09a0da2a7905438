"""The heads a model starts with copy before anything was learned."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.tiny_model.first_heads import give_first_heads

_LENGTH = 24


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).train(False)


def _share_copied(model: LlamaForCausalLM) -> float:
    """How many tokens of a repeated random list are predicted, from the fifth of the repetition on."""
    listed = torch.randint(5, 2048, (8, _LENGTH), generator=torch.Generator().manual_seed(1))
    input_ids = torch.cat((listed, listed), dim=1)
    with torch.inference_mode():
        predicted = model(input_ids=input_ids).logits.argmax(-1)
    start = _LENGTH + 4
    return (predicted[:, start:-1] == input_ids[:, start + 1 :]).float().mean().item()


def test_an_untrained_model_copies_a_random_list():
    model = _model()
    give_first_heads(model, 10_000.0)
    assert _share_copied(model) > 0.6


def test_without_the_heads_it_copies_nothing():
    assert _share_copied(_model()) < 0.05
