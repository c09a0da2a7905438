"""Word lists of the embedded model's training text, and the small grammar of words. Knows no sentences."""

from __future__ import annotations

import random
import zlib


def _listed(words: str) -> tuple[str, ...]:
    return tuple(words.split())


ANIMALS = _listed(
    """
    fox owl bear wolf hare mouse frog toad crow duck goose swan hen goat sheep lamb horse donkey cow pig
    dog cat kitten puppy rabbit squirrel badger otter beaver hedgehog deer moose lion tiger monkey
    elephant giraffe zebra camel panda koala penguin seal whale dolphin shark crab snail ant bee beetle
    spider butterfly turtle lizard snake parrot robin eagle dragon
    """
)
OBJECTS = _listed(
    """
    lantern lamp candle kite ball drum bell cup bowl spoon fork plate kettle teapot basket bucket box
    bag book letter map key lock door window chair table bed blanket pillow hat coat scarf glove boot
    shoe sock ring crown coin stone shell feather leaf flower rose seed stick rope ladder hammer nail
    saw brush pencil pen clock watch mirror boat ship train car cart wheel sled bicycle balloon puppet
    doll robot rocket flute violin piano guitar trumpet whistle flag tent sail anchor net umbrella broom
    button needle ribbon telescope compass magnet bottle jar barrel chest statue painting camera wagon
    """
)
FOODS = _listed(
    """
    apple pear plum cherry peach lemon orange banana melon grape berry carrot potato onion pumpkin
    mushroom tomato bean nut cake pie cookie pancake muffin sandwich soup bread cheese honey butter milk
    tea rice salad pudding biscuit
    """
)
UNCOUNTED_FOODS = frozenset(_listed("soup bread cheese honey butter milk tea rice salad"))
NAMES = _listed(
    """
    Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Maria Noah Olga Peter Rosa Sam Tom Uma
    Victor Wendy Max Zoe Alice Bruno Cora Daniel Ella Frank Hanna Ivan Julia Karl Lucy Mark Nina Oscar
    Paula Robert Sara Theo Vera Walter Amir Chen Dina Elias Fatima Hugo Ines Jonas Kofi Lena Mina Nils
    Omar Priya Ravi Yuki
    """
)
COLOURS = _listed("red blue green yellow white black brown orange purple pink grey golden silver")
ADJECTIVES = _listed(
    """
    small little big old young kind brave clever happy sad quiet tired funny shy proud gentle curious
    strange lovely shiny heavy tiny round soft warm cold new broken clean wet
    """
)
CHARACTERS = _listed(
    """
    small little big old young kind brave clever happy quiet tired funny shy proud gentle curious
    """
)
QUALITIES = _listed(
    """
    small big old strange lovely shiny heavy tiny round soft warm new clean
    """
)

# Each place with the word that stands before it.
PLACES = {
    place: preposition
    for preposition, places in (
        ("in", "forest garden village town city valley meadow field barn cave castle kitchen library"),
        ("in", "school park tower house desert jungle"),
        ("at", "market station harbour"),
        ("on", "hill mountain island beach farm roof bridge"),
        ("by", "river lake sea well pond mill"),
    )
    for place in _listed(places)
}
PLACE_NAMES = tuple(PLACES)

# Words that appear in prompts the model cannot answer; it learns to tell them from what it can.
OUTSIDE_WORDS = _listed(
    """
    service server computer program code python java function class network protocol message stream
    client request token model engine memory kernel thread process file database query table index error
    version release language science history physics chemistry biology music art film game sport
    football tennis politics president law money bank market price energy power light sound heat space
    planet star galaxy moon sun earth climate weather rain country capital France Germany Japan China
    India America Europe Africa London Paris Berlin Tokyo word sentence paragraph essay poem article
    list summary email translation recipe plan idea reason difference meaning example step way part kind
    type system method theory problem solution question answer test result data number equation matrix
    vector graph tree algorithm proof the a an of for with about between from into using how why when
    which should could would can is are was does write explain describe translate summarize calculate
    define compare create list give make find solve show help me my this that these best good fast large
    modern simple short long quick deep learning machine world human people brain heart doctor medicine
    vaccine virus cell gene war king queen year century time travel train flight hotel ticket phone
    internet website video image photo
    """
)

NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

# Things that are simply so. The model is meant to remember these.
COLOUR_OF = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "the sun": "yellow",
    "a lemon": "yellow",
    "milk": "white",
    "a carrot": "orange",
    "coal": "black",
    "blood": "red",
    "the sea": "blue",
    "a frog": "green",
    "a crow": "black",
    "a swan": "white",
    "an elephant": "grey",
    "a cherry": "red",
    "honey": "golden",
    "chocolate": "brown",
}
SOUND_OF = {
    "cow": "moo",
    "dog": "woof",
    "cat": "meow",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "owl": "hoot",
    "mouse": "squeak",
    "bee": "buzz",
    "lion": "roar",
    "crow": "caw",
    "frog": "ribbit",
    "hen": "cluck",
    "snake": "hiss",
}
HOME_OF = {
    "bird": "nest",
    "bee": "hive",
    "horse": "stable",
    "dog": "kennel",
    "spider": "web",
    "bear": "cave",
    "fish": "sea",
    "king": "castle",
    "pig": "sty",
    "rabbit": "burrow",
    "whale": "sea",
    "penguin": "ice",
    "camel": "desert",
}

_NOUNS = frozenset(ANIMALS) | frozenset(OBJECTS) | frozenset(FOODS) | frozenset(NAMES) | frozenset(PLACES)
_HELD_OUT_SHARE = 50
_SYLLABLE_HEADS = _listed("b br c ch d dr f fl g gr h j k kl l m n p pl qu r s sh sl st t tr v w y z")
_SYLLABLE_TAILS = _listed("a e i o u ai ee oo an en in on ar er ir or at et ip op ack ell ing ust amp")


def with_article(noun: str) -> str:
    """The noun with "a" or "an", whichever its first letter asks for."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


def at_place(place: str) -> str:
    """Where somebody is: "in the forest", "by the river"; at a place nobody knows one is "in" it."""
    return f"{PLACES.get(place, 'in')} the {place}"


def portion(food: str) -> str:
    """A food as one asks for it: "an apple", but "some honey"."""
    return f"some {food}" if food in UNCOUNTED_FOODS else with_article(food)


def capitalised(text: str) -> str:
    """The text with its first letter in upper case and the rest as it was."""
    return text[:1].upper() + text[1:]


def invented_word(rng: random.Random) -> str:
    """A word nobody knows, so that copying is learned by its letters and not by a list."""
    count = rng.choice((1, 2, 2, 2, 3))
    return "".join(rng.choice(_SYLLABLE_HEADS) + rng.choice(_SYLLABLE_TAILS) for _ in range(count))


def nouns_in(text: str) -> frozenset[str]:
    """The listed nouns and names that stand in a text."""
    words = "".join(letter if letter.isalpha() else " " for letter in text).split()
    return _NOUNS.intersection(words)


def has_held_out_pair(nouns: frozenset[str]) -> bool:
    """Whether two of the nouns are a pair that training never shows in one conversation."""
    ordered = sorted(nouns)
    return any(
        _is_held_out(first, second) for index, first in enumerate(ordered) for second in ordered[index + 1 :]
    )


def _is_held_out(first: str, second: str) -> bool:
    return zlib.crc32(f"{first}|{second}".encode()) % _HELD_OUT_SHARE == 0
