"""Training: what a batch holds, and that the same settings give the same weights."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tools.tiny_model.corpus import Example, Turn, training_examples
from tools.tiny_model.tokenizer import END, encode_example, learn_tokenizer
from tools.tiny_model.train import Settings, draw_batches, train

_SMALL = Settings(num_steps=2, tokens_per_step=128, hidden_size=32, num_layers=2, intermediate_size=64)


@pytest.fixture(scope="module", name="tokenizer")
def _tokenizer() -> PreTrainedTokenizerFast:
    examples = itertools.islice(training_examples(1), 2_000)
    return learn_tokenizer(turn.text for example in examples for turn in example.turns)


def test_only_answers_and_their_ends_are_learned(tokenizer):
    example = Example((Turn("user", "Say fox."), Turn("assistant", "fox.")))
    ids, learned = encode_example(tokenizer, example)
    assert tokenizer.decode(ids) == f"<|user|>Say fox.{END}<|assistant|>fox.{END}"
    assert (
        tokenizer.decode([each for each, is_learned in zip(ids, learned, strict=True) if is_learned])
        == f"fox.{END}"
    )


def test_encoding_is_what_the_chat_template_writes(tokenizer):
    example = Example((Turn("system", "Be brief."), Turn("user", "Hello"), Turn("assistant", "Hello!")))
    messages = [{"role": turn.role, "content": turn.text} for turn in example.turns]
    written = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer(written)["input_ids"] == encode_example(tokenizer, example)[0]


def test_targets_are_the_tokens_after_their_places(tokenizer):
    batch = next(draw_batches(_SMALL, tokenizer))
    flat = batch.input_ids.flatten()
    assert torch.equal(flat[batch.places + 1], batch.targets)


def test_batches_keep_to_their_size(tokenizer):
    for batch in itertools.islice(draw_batches(_SMALL, tokenizer), 20):
        assert batch.input_ids.numel() <= _SMALL.tokens_per_step or batch.input_ids.shape[0] == 1


def test_the_same_settings_give_the_same_weights(tmp_path):
    settings = replace(_SMALL, num_threads=1)
    train(settings, tmp_path / "first")
    train(settings, tmp_path / "second")
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.bfloat16).state_dict()
        for name in ("first", "second")
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
