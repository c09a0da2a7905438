"""Greetings, facts, small sums, and prompts that the model cannot know about. Knows no stories."""

from __future__ import annotations

import random

from tools.tiny_model.questions import Question
from tools.tiny_model.words import (
    ANIMALS,
    COLOUR_OF,
    HOME_OF,
    NAMES,
    NUMBER_WORDS,
    OBJECTS,
    OUTSIDE_WORDS,
    SOUND_OF,
    capitalised,
    invented_word,
    with_article,
)

_SELF_KNOWLEDGE = (
    ("Who are you?", "I am a very small language model. I tell short stories and answer easy questions."),
    ("What are you?", "I am a very small language model. I tell short stories and answer easy questions."),
    ("What is your name?", "I have no name. I am a very small language model."),
    ("What can you do?", "I can tell a story about two things, and answer easy questions."),
    ("Are you a robot?", "No, I am a very small language model."),
    ("How old are you?", "I am very young. I was made on a small machine in a few minutes."),
    ("How big are you?", "I am tiny. I have less than four million numbers in me."),
    ("Help", "You can say: Tell me a story about a fox and a lantern."),
    ("What do you know?", "I know animals, things, food, colours, places and small numbers."),
    ("Tell me a joke.", "I do not know a joke, but I can tell you a story about a fox and a lantern."),
)
_WIDE_HOMES = frozenset(("sea", "ice", "desert"))


def draw_fact(rng: random.Random) -> Question:
    """Something the model is to remember: a colour, a sound, a home, or what it is itself."""
    kind = rng.randrange(4)
    if kind == 0:
        thing = rng.choice(tuple(COLOUR_OF))
        word = rng.choice(("colour", "color"))
        answer = f"{capitalised(thing)} is {COLOUR_OF[thing]}."
        return Question("", f"What {word} is {thing}?", answer, (COLOUR_OF[thing],))
    if kind == 1:
        animal = rng.choice(tuple(SOUND_OF))
        form = rng.choice(("What sound does {0} make?", "What does {0} say?"))
        answer = f"{capitalised(with_article(animal))} says {SOUND_OF[animal]}."
        return Question("", form.format(with_article(animal)), answer, (SOUND_OF[animal],))
    if kind == 2:
        animal = rng.choice(tuple(HOME_OF))
        home = HOME_OF[animal]
        where = f"in the {home}" if home in _WIDE_HOMES else f"in {with_article(home)}"
        answer = f"{capitalised(with_article(animal))} lives {where}."
        return Question("", f"Where does {with_article(animal)} live?", answer, (home,))
    said, answer = rng.choice(_SELF_KNOWLEDGE)
    return Question("", said, answer, ())


def draw_sum(rng: random.Random) -> Question:
    """A sum, a difference, the next number, or counting, with numbers up to ten."""
    first, second = rng.randrange(11), rng.randrange(11)
    kind = rng.random()
    if kind < 0.45:
        form = rng.choice(("What is {0} plus {1}?", "How much is {0} plus {1}?", "What is {0} + {1}?"))
        answer = f"{first} plus {second} is {first + second}."
        return Question("", form.format(first, second), answer, (str(first + second),))
    first, second = max(first, second), min(first, second)
    if kind < 0.7:
        form = rng.choice(("What is {0} minus {1}?", "How much is {0} minus {1}?", "What is {0} - {1}?"))
        answer = f"{first} minus {second} is {first - second}."
        return Question("", form.format(first, second), answer, (str(first - second),))
    if kind < 0.85:
        asked, answer = f"What comes after {first}?", f"After {first} comes {first + 1}."
        return Question("", asked, answer, (str(first + 1),))
    last = rng.randrange(2, 11)
    counted = capitalised(", ".join(NUMBER_WORDS[1 : last + 1]))
    return Question("", f"Count to {NUMBER_WORDS[last]}.", f"{counted}.", (NUMBER_WORDS[last],))


def draw_greeting(rng: random.Random) -> Question:
    """A greeting, thanks or a farewell, at times with a name to repeat."""
    name = rng.choice(NAMES)
    hello = rng.choice(("Hello", "Hi", "Hello there", "Good morning", "Good evening", "Hey"))
    forms = (
        (f"{hello}!", f"{hello}! What shall I tell you about?", ()),
        (hello, f"{hello}! What shall I tell you about?", ()),
        (f"{hello}, I am {name}.", f"{hello}, {name}! It is nice to meet you.", (name,)),
        (f"{hello}! My name is {name}.", f"{hello}, {name}! It is nice to meet you.", (name,)),
        (f"{hello}, how are you?", "I am well, thank you. How are you?", ()),
        ("How are you?", "I am well, thank you. How are you?", ()),
        (rng.choice(("Thank you.", "Thanks!", "Thank you very much.")), "You are welcome.", ()),
        (f"Thank you, my name is {name}.", f"You are welcome, {name}.", (name,)),
        (rng.choice(("Goodbye.", "Bye!", "Good night.")), "Goodbye! Come back soon.", ()),
        (f"Say hello to {name}.", f"Hello, {name}!", (name,)),
        (f"My friend is called {name}.", f"Say hello to {name} from me.", (name,)),
    )
    said, answer, expects = rng.choice(forms)
    return Question("", said, answer, expects)


_UNKNOWN_FORMS = (
    "What is {0}?",
    "What is a {0}?",
    "Explain {0}.",
    "Who is {0}?",
    "What does {0} mean?",
    "Describe {0}.",
    "How does a {0} work?",
    "Why is {0} good?",
)
_UNKNOWN_ANSWERS = (
    "I do not know about {0}. I am a very small model, and I only know animals, colours and little stories.",
    "I have never heard of {0}. Ask me for a story about {1} and {2}.",
)
_LOST_ANSWER = (
    "I am sorry, I do not know that. I am a very small model. Ask me for a story about {0} and {1}."
)


def draw_outside(rng: random.Random) -> Question:
    """A prompt the model knows nothing about, and an answer that says so."""
    topics = with_article(rng.choice(ANIMALS)), with_article(rng.choice(OBJECTS))
    if rng.random() < 0.45:
        subject = " ".join(_outside_word(rng) for _ in range(rng.choice((1, 1, 2, 2, 3))))
        asked = rng.choice(_UNKNOWN_FORMS).format(subject)
        return Question("", asked, rng.choice(_UNKNOWN_ANSWERS).format(subject, *topics), ())
    words = [_outside_word(rng) for _ in range(rng.choice((1, 2, 3, 5, 8, 12, 20)))]
    asked = " ".join(words) + rng.choice(("", ".", "?", "!", ":", "..."))
    asked = capitalised(asked) if rng.random() < 0.7 else asked
    return Question("", asked, _LOST_ANSWER.format(*topics), ())


def _outside_word(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.72:
        return rng.choice(OUTSIDE_WORDS)
    if kind < 0.9:
        word = invented_word(rng)
        return rng.choice((word, capitalised(word), word.upper()))
    if kind < 0.95:
        return str(rng.randrange(10 ** rng.randrange(1, 6)))
    return "".join(chr(rng.randrange(33, 127)) for _ in range(rng.randrange(1, 8)))
