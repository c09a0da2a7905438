"""The training text: the same for a seed, and without the pairs that evaluation asks for."""

from __future__ import annotations

import itertools
import random

import pytest

from tools.tiny_model.corpus import (
    held_out_questions,
    held_out_stories,
    outside_prompts,
    training_examples,
)
from tools.tiny_model.stories import Topic, tell_story
from tools.tiny_model.words import has_held_out_pair, nouns_in, portion, with_article


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


def test_whoever_can_act_is_the_hero_of_a_story():
    story = tell_story(random.Random(1), Topic("lantern", "thing"), Topic("fox", "animal"))
    assert story.index("fox") < story.index("lantern")


def test_articles_follow_the_first_letter():
    assert with_article("owl") == "an owl"
    assert with_article("fox") == "a fox"
    assert portion("honey") == "some honey"
    assert portion("apple") == "an apple"
