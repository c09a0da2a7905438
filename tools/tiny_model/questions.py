"""Questions whose answers repeat nouns of the question or of what was told before it. Knows no stories."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.tiny_model.words import (
    ADJECTIVES,
    ANIMALS,
    COLOURS,
    FOODS,
    NAMES,
    OBJECTS,
    PLACE_NAMES,
    at_place,
    capitalised,
    portion,
    with_article,
)


@dataclass(frozen=True, slots=True)
class Question:
    """Something told, something asked about it, the answer, and the words a right answer must hold."""

    statement: str
    asked: str
    answer: str
    expects: tuple[str, ...]


def draw_question(rng: random.Random) -> Question:
    """One question of a family drawn at random."""
    return rng.choice(_FAMILIES)(rng)


def _draw_two(rng: random.Random, words: tuple[str, ...]) -> tuple[str, str]:
    first, second = rng.choice(words), rng.choice(words)
    return (first, second) if first != second else _draw_two(rng, words)


def _draw_actors(rng: random.Random) -> tuple[str, str]:
    """Two actors as they stand in a sentence: two names or two animals."""
    if rng.random() < 0.6:
        return _draw_two(rng, NAMES)
    first, second = _draw_two(rng, ANIMALS)
    return f"the {first}", f"the {second}"


def _draw_thing(rng: random.Random) -> tuple[str, str]:
    """A thing as it is told, at times with its colour, and its bare noun."""
    noun = rng.choice(OBJECTS)
    return (f"{rng.choice(COLOURS)} {noun}" if rng.random() < 0.35 else noun), noun


def _bare(actor: str) -> str:
    return actor.removeprefix("the ")


def _having(rng: random.Random) -> Question:
    one, _ = _draw_actors(rng)
    (first, noun), (second, other_noun) = _draw_thing(rng), _draw_thing(rng)
    if noun == other_noun:
        return _having(rng)
    statement = capitalised(f"{one} has {with_article(first)}.")
    answer = capitalised(f"{one} has {with_article(first)}.")
    form = rng.randrange(4)
    if form < 2:
        return Question(statement, f"What does {one} have?", answer, (_bare(one), first))
    if form == 2:
        return Question(
            statement, f"Who has the {noun}?", capitalised(f"{one} has the {noun}."), (_bare(one), noun)
        )
    asked = second if rng.random() < 0.5 else first
    lead = "Yes" if asked == first else "No"
    answer = f"{lead}, {one} has {with_article(first)}."
    return Question(statement, f"Does {one} have {with_article(asked)}?", answer, (lead, _bare(one), first))


def _colouring(rng: random.Random) -> Question:
    first, _ = _draw_two(rng, OBJECTS)
    colour, _ = rng.sample(COLOURS, 2)
    statement = capitalised(f"the {first} is {colour}.")
    answer = f"The {first} is {colour}."
    if rng.random() < 0.3:
        return Question(statement, f"Which thing is {colour}?", answer, (first, colour))
    word = rng.choice(("colour", "colour", "color"))
    return Question(statement, f"What {word} is the {first}?", answer, (first, colour))


def _owned_colour(rng: random.Random) -> Question:
    one, _ = _draw_actors(rng)
    first, _ = _draw_two(rng, OBJECTS)
    colour, _ = rng.sample(COLOURS, 2)
    statement = capitalised(f"{one} has {with_article(f'{colour} {first}')}.")
    word = rng.choice(("colour", "colour", "color"))
    whose = f"the {first}" if rng.random() < 0.6 else f"the {first} of {one}"
    return Question(
        statement, f"What {word} is {whose}?", capitalised(f"{whose} is {colour}."), (first, colour)
    )


def _liking(rng: random.Random) -> Question:
    one, _ = _draw_actors(rng)
    first, _ = _draw_two(rng, FOODS)
    statement = capitalised(f"{one} likes {portion(first)}.")
    answer = capitalised(f"{one} likes {portion(first)}.")
    asked = f"Who likes {portion(first)}?" if rng.random() < 0.4 else f"What does {one} like?"
    return Question(statement, asked, answer, (_bare(one), first))


def _living(rng: random.Random) -> Question:
    one, _ = _draw_actors(rng)
    home, _ = rng.sample(PLACE_NAMES, 2)
    verb, asks = rng.choice((("lives", "live"), ("sleeps", "sleep"), ("works", "work")))
    statement = capitalised(f"{one} {verb} {at_place(home)}.")
    answer = capitalised(f"{one} {verb} {at_place(home)}.")
    asked = f"Where does {one} {asks}?" if rng.random() < 0.7 else f"Who {verb} {at_place(home)}?"
    return Question(statement, asked, answer, (_bare(one), home))


def _lying(rng: random.Random) -> Question:
    first, _ = _draw_two(rng, OBJECTS)
    place, _ = rng.sample(PLACE_NAMES, 2)
    statement = capitalised(f"the {first} is {at_place(place)}.")
    asked = f"Where is the {first}?" if rng.random() < 0.7 else f"What is {at_place(place)}?"
    return Question(statement, asked, f"The {first} is {at_place(place)}.", (first, place))


def _going(rng: random.Random) -> Question:
    one, _ = _draw_actors(rng)
    place, _ = rng.sample(PLACE_NAMES, 2)
    statement = capitalised(f"{one} went to the {place}.")
    answer = capitalised(f"{one} went to the {place}.")
    asked = f"Where did {one} go?" if rng.random() < 0.6 else f"Who went to the {place}?"
    return Question(statement, asked, answer, (_bare(one), place))


def _giving(rng: random.Random) -> Question:
    one, two = _draw_actors(rng)
    thing, noun = _draw_thing(rng)
    verb, past = rng.choice((("give", "gave"), ("show", "showed"), ("bring", "brought")))
    statement = capitalised(f"{one} {past} {with_article(thing)} to {two}.")
    form = rng.randrange(3)
    if form == 0:
        return Question(
            statement, f"What did {one} {verb} to {two}?", statement, (_bare(one), thing, _bare(two))
        )
    if form == 1:
        asked = f"Who {past} {with_article(noun)} to {two}?"
        return Question(statement, asked, statement, (_bare(one), thing, _bare(two)))
    answer = capitalised(f"{two} has the {noun} now.")
    return Question(statement, f"Who has the {noun} now?", answer, (_bare(two), noun))


def _doing(rng: random.Random) -> Question:
    one, _ = _draw_actors(rng)
    (first, noun), (_, other_noun) = _draw_thing(rng), _draw_thing(rng)
    if noun == other_noun:
        return _doing(rng)
    verb, past = rng.choice(_DEEDS)
    statement = capitalised(f"{one} {past} {with_article(first)}.")
    asked = f"What did {one} {verb}?" if rng.random() < 0.6 else f"Who {past} the {noun}?"
    return Question(
        statement, asked, capitalised(f"{one} {past} {with_article(first)}."), (_bare(one), first)
    )


_DEEDS = (("find", "found"), ("lose", "lost"), ("see", "saw"), ("buy", "bought"), ("make", "made"))


def _describing(rng: random.Random) -> Question:
    one, _ = _draw_actors(rng)
    quality, _ = rng.sample(ADJECTIVES, 2)
    statement = capitalised(f"{one} is {quality}.")
    asked = f"Who is {quality}?" if rng.random() < 0.5 else f"How is {one}?"
    return Question(statement, asked, capitalised(f"{one} is {quality}."), (_bare(one), quality))


def _kinds(rng: random.Random) -> Question:
    kinds = (
        ("an animal", ANIMALS),
        ("a thing", OBJECTS),
        ("something to eat", FOODS),
        ("a place", PLACE_NAMES),
    )
    (kind, words), (_, other_words) = rng.sample(kinds, 2)
    first, second = rng.choice(words), rng.choice(other_words)
    one, two = (first, second) if rng.random() < 0.5 else (second, first)
    asked = f"Which is {kind}: {with_article(one)} or {with_article(two)}?"
    return Question("", asked, f"{capitalised(with_article(first))} is {kind}.", (first,))


def _repeating(rng: random.Random) -> Question:
    lists = (ANIMALS, OBJECTS, FOODS, NAMES, PLACE_NAMES, COLOURS)
    words = [rng.choice(rng.choice(lists)) for _ in range(rng.choice((1, 1, 2, 2, 3)))]
    phrase = " ".join(words)
    form = rng.choice(("Say: {0}.", "Repeat after me: {0}.", "Say {0}.", "Please repeat: {0}"))
    return Question("", form.format(phrase), f"I say: {phrase}.", tuple(words))


def _opinion(rng: random.Random) -> Question:
    first, second = _draw_two(rng, rng.choice((ANIMALS, OBJECTS)))
    form = rng.randrange(4)
    if form == 0:
        asked = f"Which do you like more: {with_article(first)} or {with_article(second)}?"
        answer = f"I like the {first} and the {second}, but the {first} more."
        return Question("", asked, answer, (first, second))
    if form == 1:
        asked = f"Do you {rng.choice(('know', 'like'))} {with_article(first)}?"
        return Question("", asked, f"Yes, {with_article(first)} is a good friend of mine.", (first,))
    if form == 2:
        asked = f"Can {with_article(first)} carry {with_article(second)}?"
        return Question(
            "", asked, f"Yes, a strong {first} can carry {with_article(second)}.", (first, second)
        )
    place = rng.choice(PLACE_NAMES)
    statement = f"I left my {first} {at_place(place)}."
    asked = rng.choice((f"Have you seen my {first}?", f"Where is my {first}?"))
    return Question(statement, asked, f"Your {first} is {at_place(place)}.", (first, place))


def _about_me(rng: random.Random) -> Question:
    name = rng.choice(NAMES)
    form = rng.randrange(3)
    if form == 0:
        statement = rng.choice((f"My name is {name}.", f"I am {name}.", f"I am called {name}."))
        asked = rng.choice(("What is my name?", "Who am I?", "What am I called?"))
        return Question(statement, asked, f"Your name is {name}.", (name,))
    if form == 1:
        food = portion(rng.choice(FOODS))
        return Question(f"I am {name} and I like {food}.", "What do I like?", f"You like {food}.", (food,))
    thing = with_article(_draw_thing(rng)[0])
    return Question(f"I am {name} and I have {thing}.", "What do I have?", f"You have {thing}.", (thing,))


_FAMILIES: tuple[Callable[[random.Random], Question], ...] = (
    _having,
    _having,
    _colouring,
    _owned_colour,
    _liking,
    _living,
    _lying,
    _going,
    _giving,
    _doing,
    _describing,
    _kinds,
    _repeating,
    _opinion,
    _about_me,
)
