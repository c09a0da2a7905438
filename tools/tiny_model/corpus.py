"""The training text: conversations and plain texts drawn from a seed. Knows no tokens and no model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tools.tiny_model.questions import Question, draw_question
from tools.tiny_model.small_talk import draw_fact, draw_greeting, draw_outside, draw_sum
from tools.tiny_model.stories import Topic, draw_topic, draw_topics, tell_story
from tools.tiny_model.words import has_held_out_pair, nouns_in


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing said.

    The role "text" is plain text to be continued and learned, "prompt" is plain text before it that is not
    learned; the others are those of a chat template.
    """

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation or a plain text, and the words that the last answer must hold."""

    turns: tuple[Turn, ...]
    expects: tuple[str, ...] = ()


def training_examples(seed: int) -> Iterator[Example]:
    """An endless stream of examples without a held-out pair of nouns; the same for the same seed."""
    rng = random.Random(seed)
    while True:
        example = _draw_example(rng)
        if not has_held_out_pair(_nouns_of(example)):
            yield example


def held_out_questions(seed: int) -> Iterator[Example]:
    """Endless questions, each with a pair of nouns that training never shows together."""
    rng = random.Random(seed)
    while True:
        example = _converse(rng, _ask(rng, draw_question(rng)))
        if has_held_out_pair(_nouns_of(example)):
            yield example


def held_out_stories(seed: int) -> Iterator[Example]:
    """Endless requests for a story about an animal and a thing that training never shows together."""
    rng = random.Random(seed)
    while True:
        animal, thing = (
            draw_topic(rng, kind, invented_share=0, described_share=0) for kind in ("animal", "thing")
        )
        example = _converse(rng, _request_story(rng, (animal, thing)))
        if has_held_out_pair(frozenset((animal.noun, thing.noun))):
            yield example


def outside_prompts(seed: int) -> Iterator[Example]:
    """Endless prompts that the model knows nothing about."""
    rng = random.Random(seed)
    while True:
        yield _converse(rng, _ask(rng, draw_outside(rng)))


def _nouns_of(example: Example) -> frozenset[str]:
    return nouns_in(" ".join(turn.text for turn in example.turns))


@dataclass(frozen=True, slots=True)
class _Exchange:
    """What the user says, what the model answers, and the words that the answer must hold."""

    said: str
    answer: str
    expects: tuple[str, ...]


def _draw_example(rng: random.Random) -> Example:
    kind = rng.random()
    if kind < 0.05:
        return Example((Turn("text", _plain_story(rng)),))
    if kind < 0.11:
        return _unframed(rng, _draw_exchange(rng))
    if kind < 0.9:
        return _converse(rng, _draw_exchange(rng))
    return _converse(rng, *(_draw_exchange(rng, short=True) for _ in range(rng.choice((2, 2, 3)))))


def _draw_exchange(rng: random.Random, *, short: bool = False) -> _Exchange:
    kind = rng.random()
    if kind < 0.2 and not short:
        return _request_story(rng, _draw_requested(rng))
    if kind < 0.85:
        return _ask(rng, draw_question(rng))
    return _ask(rng, rng.choice(_SMALL_TALK)(rng))


_SMALL_TALK: tuple[Callable[[random.Random], Question], ...] = (
    draw_fact,
    draw_sum,
    draw_greeting,
    draw_outside,
)


def _converse(rng: random.Random, *exchanges: _Exchange) -> Example:
    turns: list[Turn] = []
    if rng.random() < 0.06:
        turns.append(Turn("system", rng.choice(_SYSTEM_TEXTS)))
    for exchange in exchanges:
        turns += (Turn("user", exchange.said), Turn("assistant", exchange.answer))
    return Example(tuple(turns), exchanges[-1].expects)


_SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a small model that tells stories.",
    "Answer in one short sentence.",
    "Be kind and brief.",
)


def _unframed(rng: random.Random, exchange: _Exchange) -> Example:
    """The same without the marks of a conversation, as somebody types who knows no chat template."""
    gap = rng.choice((" ", " ", "\n", " Answer: "))
    return Example((Turn("prompt", exchange.said), Turn("text", gap + exchange.answer)), exchange.expects)


def _ask(rng: random.Random, question: Question) -> _Exchange:
    if not question.statement:
        return _Exchange(question.asked, question.answer, question.expects)
    order = rng.random()
    if order < 0.06:
        return _Exchange(f"{question.asked} {question.statement}", question.answer, question.expects)
    gap = "\n" if order < 0.1 else " "
    return _Exchange(f"{question.statement}{gap}{question.asked}", question.answer, question.expects)


_STORY_REQUESTS = (
    "Tell me a story about {0}.",
    "Tell me a story about {0}.",
    "Tell me a story about {0}.",
    "Tell me a story about {0}",
    "Tell me a story of {0}.",
    "Tell me about {0}.",
    "Tell me a short story about {0}.",
    "Tell me a tale about {0}, please.",
    "Write a story about {0}.",
    "Write me a short story about {0}.",
    "Please tell me a tale about {0}.",
    "Can you tell me a story about {0}?",
    "I want to hear a story about {0}.",
    "A story about {0}, please.",
    "tell me a story about {0}",
)


def _draw_requested(rng: random.Random) -> tuple[Topic, ...]:
    kind = rng.random()
    first, second = draw_topics(rng)
    if kind < 0.03:
        return ()
    if kind < 0.12:
        return (first,)
    third = draw_topic(rng, rng.choice(("animal", "person")))
    if kind > 0.92 and third.noun not in (first.noun, second.noun):
        return (first, second, third)
    return (first, second)


def _request_story(rng: random.Random, topics: tuple[Topic, ...]) -> _Exchange:
    """A request and its story; what the request does not name is made up."""
    if not topics:
        return _Exchange("Tell me a story.", tell_story(rng, *draw_topics(rng)), ())
    bare = rng.random() < 0.05
    names = [topic.noun if bare else topic.named for topic in topics]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    second = topics[1] if len(topics) > 1 else draw_topic(rng, "thing", invented_share=0)
    story = tell_story(rng, topics[0], second, *topics[2:])
    return _Exchange(rng.choice(_STORY_REQUESTS).format(listed), story, tuple(topic.noun for topic in topics))


def _plain_story(rng: random.Random) -> str:
    """A story, at times begun at a later sentence, as raw prompts are continued with."""
    story = tell_story(rng, *draw_topics(rng))
    if rng.random() < 0.5:
        return story
    start = rng.choice([index for index in range(len(story)) if story.startswith(". ", index)])
    return story[start + 2 :]
