"""Training: what a batch holds, and that the same settings give the same weights."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tools.tiny_model.corpus import (
    Example,
    Turn,
    held_out_questions,
    held_out_stories,
    outside_prompts,
    training_examples,
)
from tools.tiny_model.first_heads import give_first_heads
from tools.tiny_model.stories import Topic, tell_story
from tools.tiny_model.tokenizer import END, encode_example, learn_tokenizer
from tools.tiny_model.train import Settings, draw_batches, train
from tools.tiny_model.words import has_held_out_pair, nouns_in, portion, with_article

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


def test_targets_are_the_tokens_after_their_positions(tokenizer):
    batch = next(draw_batches(_SMALL, tokenizer))
    flat = batch.input_ids.flatten()
    assert torch.equal(flat[batch.positions + 1], batch.targets)


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


# The training text: the same for a seed, and without the pairs that evaluation asks for.


@pytest.mark.parametrize("stream", [training_examples, held_out_questions, held_out_stories, outside_prompts])
def test_the_same_seed_gives_the_same_text(stream):
    assert list(itertools.islice(stream(3), 50)) == list(itertools.islice(stream(3), 50))
    assert list(itertools.islice(stream(3), 50)) != list(itertools.islice(stream(4), 50))


def test_training_never_shows_a_held_out_pair():
    for example in itertools.islice(training_examples(5), 500):
        assert not has_held_out_pair(nouns_in(" ".join(turn.text for turn in example.turns)))


def test_the_last_answer_holds_the_expected_words():
    for example in itertools.islice(training_examples(6), 500):
        assert all(word in example.turns[-1].text for word in example.expects)


def test_a_conversation_ends_with_an_answer():
    for example in itertools.islice(training_examples(7), 200):
        assert example.turns[-1].role in ("assistant", "text")


def test_a_character_that_can_act_is_the_hero_of_a_story():
    story = tell_story(random.Random(1), Topic("lantern", "thing"), Topic("fox", "animal"))
    assert story.index("fox") < story.index("lantern")


def test_articles_follow_the_first_letter():
    assert with_article("owl") == "an owl"
    assert with_article("fox") == "a fox"
    assert portion("honey") == "some honey"
    assert portion("apple") == "an apple"


# The heads a model starts with copy before anything was learned.

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
