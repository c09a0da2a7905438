"""From a seed to its requests, its engines and its faults, and how often which entries meet."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tests.composition.draws import Added, Draw, TinyModel
from tests.composition.table import (
    CONDITIONS,
    ENTRIES,
    FAULTS,
    OPTIONS,
    Condition,
    Fault,
    Option,
    Refusal,
    refusals_of,
)
from triptych.api.v1 import generate_pb2

_NUM_REQUESTS = (6, 9)
# So many that every two conditions are together in a quarter of them, see `conditions_of`.
NUM_RIGS = 1 << len(CONDITIONS).bit_length()


@dataclass(frozen=True, slots=True)
class Drawn:
    """One request with the names of its options. `refusals` are the answers one of which it gets, if any.

    added, sends_ahead: see `Draw`.
    """

    request: generate_pb2.GenerateRequest
    options: frozenset[str]
    refusals: tuple[Refusal, ...]
    added: tuple[Added, ...] = ()
    sends_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """All of a seed."""

    seed: int
    conditions: tuple[Condition, ...]
    faults: tuple[Fault, ...]
    drawn: tuple[Drawn, ...]

    @property
    def surroundings(self) -> frozenset[str]:
        entries: tuple[Condition | Fault, ...] = (*self.conditions, *self.faults)
        return frozenset(entry.name for entry in entries)


def rig_of(seed: int) -> int:
    return seed % NUM_RIGS


def conditions_of(rig: int) -> tuple[Condition, ...]:
    """Condition k where k and the rig share an odd number of bits: any two of them are independent."""
    drawn = [
        condition
        for position, condition in enumerate(CONDITIONS, start=1)
        if ((condition.number or position) & rig).bit_count() % 2
    ]
    ruled_out = frozenset[str]().union(*(condition.rules_out for condition in drawn))
    return tuple(condition for condition in drawn if condition.name not in ruled_out)


def draw_case(seed: int, model: TinyModel) -> Case:
    """The same for any model but for token ids and texts."""
    rng = random.Random(seed)
    conditions = conditions_of(rig_of(seed))
    faults = tuple(fault for fault in FAULTS if rng.random() < fault.share)
    names = frozenset(condition.name for condition in conditions)
    # Each with its own numbers: how many a value takes depends on the model.
    drawn = [
        _draw_request(random.Random(f"{seed}-{index}"), model, names)
        for index in range(rng.randint(*_NUM_REQUESTS))
    ]
    return Case(seed, conditions, faults, tuple(drawn))


def _draw_request(rng: random.Random, model: TinyModel, conditions: frozenset[str]) -> Drawn:
    options = _draw_options(rng)
    draw = Draw(rng, model)
    draw.begin()
    for option in options:
        value = option.choose(draw)
        if value is not None:
            draw.set(option.name.split()[0], value)
    draw.end()
    names = frozenset(option.name for option in options)
    refusals = tuple(refusals_of(names | conditions))
    return Drawn(draw.request, names, refusals, tuple(draw.added), draw.sends_ahead)


def _draw_options(rng: random.Random) -> list[Option]:
    options: list[Option] = []
    for option in OPTIONS:
        is_free = not option.kind or all(option.kind != other.kind for other in options)
        if rng.random() < option.share and is_free:
            options.append(option)
    return options


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many requests were served with an entry and with two together, and how many were refused."""

    names: Mapping[str, int]
    pairs: Mapping[frozenset[str], int]
    refusals: Mapping[Refusal, int]

    @classmethod
    def of(cls, cases: Iterable[Case]) -> Coverage:
        names: Counter[str] = Counter()
        pairs: Counter[frozenset[str]] = Counter()
        refusals: Counter[Refusal] = Counter()
        for case in cases:
            for drawn in case.drawn:
                refusals.update(drawn.refusals)
                if not drawn.refusals:
                    together = drawn.options | case.surroundings
                    names.update(together)
                    pairs.update(map(frozenset, itertools.combinations(together, 2)))
        return cls(names, pairs, refusals)


def possible_pairs() -> set[frozenset[str]]:
    """All pairs of entries that can meet in a request that is served."""
    kinds = {option.name: option.kind for option in OPTIONS if option.kind}
    names = [entry.name for entry in ENTRIES]
    never = {frozenset((each.name, other)) for each in CONDITIONS for other in each.rules_out}
    return {
        frozenset((one, other))
        for one, other in itertools.combinations(names, 2)
        if kinds.get(one, one) != kinds.get(other, other) and not refusals_of(frozenset((one, other)))
    } - never
