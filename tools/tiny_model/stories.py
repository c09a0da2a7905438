"""Short stories about one to three things somebody names, made from plots. Knows no tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.tiny_model.words import (
    ADJECTIVES,
    ANIMALS,
    CHARACTERS,
    COLOURS,
    FOODS,
    NAMES,
    OBJECTS,
    PLACE_NAMES,
    QUALITIES,
    at_place,
    capitalised,
    invented_word,
    portion,
    with_article,
)


@dataclass(frozen=True, slots=True)
class Topic:
    """One of the things a story is about: the noun as it is named, and how it acts."""

    noun: str
    kind: str  # "animal", "person" or "thing"

    @property
    def named(self) -> str:
        """As it stands in the request: "a fox", "Anna"."""
        return self.noun if self.kind == "person" else with_article(self.noun)

    @property
    def known(self) -> str:
        """As it stands in the story: "the fox", "Anna"."""
        return self.noun if self.kind == "person" else f"the {self.noun}"

    def introduced(self, quality: str) -> str:
        """As it first enters: "a little fox", "a little child called Anna"; an adjective of its own stays."""
        if self.kind == "person":
            return with_article(f"{quality} child called {self.noun}")
        return with_article(self.noun if " " in self.noun else f"{quality} {self.noun}")


_OPENINGS = (
    "Once upon a time there was {introduced} who lived {home}.",
    "Once upon a time, {introduced} lived {home}.",
    "There was once {introduced} who lived {home}.",
    "Long ago, {introduced} lived {home}.",
)
_TIMES = ("One day", "One morning", "One evening", "One cold night", "One sunny day", "One winter day")
_ENDINGS = (
    "From that day on, {hero} and {other} were never apart.",
    "And so {hero} was happy, and {other} was safe.",
    "That night {hero} lay down beside {other} and slept well.",
    "Since then, everybody {home} knows {hero} and {other}.",
    "{Hero} never forgot that day, and {other} never left.",
    "And that is the story of {hero} and {other}.",
)
_Plot = tuple[tuple[str, ...], ...]
_FINDING: _Plot = (
    (
        "{when} {hero} walked {place} and found {a_other}.",
        "{when} {hero} looked for {food} {place} and found {a_other} instead.",
        "{when}, far from home, {hero} saw {a_other} lying {place}.",
    ),
    ("It was {colour} and very {quality}.", "It was {quality} and {colour}, and it shone in the sun."),
    (
        '"What a {quality} {other_noun}!" said {hero}. "Who has lost it?"',
        '"I have never seen such a {quality} {other_noun}," said {hero}.',
        "{Hero} did not know what to do with it.",
    ),
    (
        "{Hero} took {other} home and put it by the window.",
        "{Hero} carried {other} all the way home.",
        "{Hero} asked {friend} about {other}, but {friend} only laughed.",
    ),
    (
        "Then {friend} came by and asked to see {other}, so {hero} shared it.",
        "In the evening {friend} came and they looked at {other} together.",
        "When it grew dark, {other} helped {friend} to find the way home.",
    ),
)
_LOSING: _Plot = (
    (
        "{Hero} had {a_other}, and loved it more than anything.",
        "{Hero} owned {a_other} that was {colour} and {quality}.",
    ),
    (
        "{when} {other} was gone.",
        "{when} {hero} lost {other} {place}.",
        "{when} the wind took {other} away.",
    ),
    (
        '"Where is my {other_noun}?" cried {hero}.',
        "{Hero} looked everywhere, but could not find it.",
        '{Hero} asked {friend}: "Have you seen my {other_noun}?"',
    ),
    (
        "{Friend} said that {other} was {place}, so they went there together.",
        "At last {friend} found {other} {place}.",
        "{Friend} had seen {other} {place} and showed the way.",
    ),
    ("{Hero} thanked {friend} and gave {friend} {food}.", "{Hero} was so glad that they danced until night."),
)
_MEETING: _Plot = (
    (
        "{when} {hero} met {a_other} {place}.",
        "{when} {a_other} came to the house of {hero}.",
        "{when} {hero} heard {a_other} singing {place}.",
    ),
    (
        '"Who are you?" asked {hero}. "I am {a_other}, and I am {mood}," said {other}.',
        '"Good day," said {hero}. "Will you play with me?" asked {other}.',
        "At first {hero} was afraid, but {other} was {mood}.",
    ),
    (
        "They shared {food} and talked until the stars came out.",
        "{Hero} gave {other} {food}, and {other} sang a song.",
        "Together they made {a_thing} out of wood.",
    ),
    (
        "Then it began to rain, and {other} showed {hero} a dry place {place}.",
        "When {hero} fell into the water, {other} pulled {hero} out.",
        "When {other} was lost, {hero} followed the stars and found {other}.",
    ),
    ('"You are a good friend," said {other}.', '"Let us meet again," said {hero}.'),
)
_SPEAKING: _Plot = (
    (
        "{when} {hero} began to speak to {a_other} {place}.",
        "{when} somebody put {a_other} next to {hero}.",
        "{when} {hero} met {a_other} {place}.",
    ),
    (
        '"I am {colour} and {quality}," said {hero}. "And who are you?"',
        '"Nobody needs me," said {hero}. "I do," said {other}.',
    ),
    (
        "{Other} had come from far away and was very {mood}.",
        "{Other} was {colour}, and that made {hero} laugh.",
    ),
    (
        "Then {friend} came and took them both home.",
        "{Friend} heard them talk and could not believe it.",
        "Every night they told each other stories until {friend} fell asleep.",
    ),
)
_OBJECT_KIND = "thing"


def draw_topic(
    rng: random.Random, kind: str, *, invented_share: float = 0.15, described_share: float = 0.15
) -> Topic:
    """A topic of a kind: mostly a listed noun, at times an invented one, at times with an adjective."""
    lists = {"animal": ANIMALS, "person": NAMES, "thing": OBJECTS}
    noun = rng.choice(lists[kind])
    if rng.random() < invented_share:
        noun = invented_word(rng)
        noun = capitalised(noun) if kind == "person" else noun
    if kind != "person" and rng.random() < described_share:
        noun = f"{rng.choice(ADJECTIVES + COLOURS)} {noun}"
    return Topic(noun, kind)


def draw_topics(rng: random.Random) -> tuple[Topic, Topic]:
    """Two different topics, in the order in which a request may name them."""
    kinds = rng.choice(
        (("animal", "thing"),) * 8
        + (
            ("animal", "animal"),
            ("person", "thing"),
            ("person", "animal"),
            ("thing", "animal"),
            ("thing", "thing"),
        )
        * 2
        + (("person", "person"), ("animal", "person"), ("thing", "person"))
    )
    first, second = (draw_topic(rng, kind) for kind in kinds)
    return (first, second) if first.noun != second.noun else draw_topics(rng)


def tell_story(rng: random.Random, first: Topic, second: Topic, friend: Topic | None = None) -> str:
    """A story of six or seven sentences about the topics; whoever can act is its hero.

    `friend` is who comes by in it. None is some animal.
    """
    hero, other = (second, first) if first.kind == "thing" and second.kind != "thing" else (first, second)
    if hero.kind == _OBJECT_KIND:
        plot = _SPEAKING
    elif other.kind == _OBJECT_KIND:
        plot = rng.choice((_FINDING, _FINDING, _LOSING))
    else:
        plot = _MEETING
    slots = _draw_slots(rng, hero, other, friend)
    middle = [rng.choice(choices) for choices in plot]
    if friend is not None:
        middle.append("In the end {friend} came, and the three of them sang and danced.")
    forms = [rng.choice(_OPENINGS), *middle, rng.choice(_ENDINGS)]
    return " ".join(capitalised(form.format_map(slots)) for form in forms)


def _draw_slots(rng: random.Random, hero: Topic, other: Topic, friend: Topic | None) -> dict[str, str]:
    home, place = rng.sample(PLACE_NAMES, 2)
    friend = friend or Topic(
        rng.choice([each for each in ANIMALS if each not in (hero.noun, other.noun)]), "animal"
    )
    mood = rng.choice(CHARACTERS)
    return {
        "introduced": hero.introduced(mood),
        "home": at_place(home),
        "place": at_place(place),
        "when": rng.choice(_TIMES),
        "hero": hero.known,
        "Hero": capitalised(hero.known),
        "other": other.known,
        "Other": capitalised(other.known),
        "a_other": other.named,
        "other_noun": other.noun,
        "friend": friend.known,
        "Friend": capitalised(friend.known),
        "food": portion(rng.choice(FOODS)),
        "a_thing": with_article(rng.choice(OBJECTS)),
        "colour": rng.choice(COLOURS),
        "quality": rng.choice(QUALITIES),
        "mood": mood,
    }
