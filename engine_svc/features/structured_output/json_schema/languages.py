"""Sets of texts by patterns: their complements, intersections and lookaheads as a pattern without these.

A set is a term over classes of characters; the derivatives of terms are the states of an automaton, whose
paths are written as a pattern again (Brzozowski 1964).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from engine_svc.features.structured_output.json_schema.patterns import (
    LAST_CODE,
    LOOKAHEADS,
    ONE,
    UNWRITABLE_CODES,
    Ranges,
    UnsupportedPattern,
    code_of,
    outside,
    translated,
    written_class,
)

STEPS = 10_000  # of proof that one automaton counts as
MAX_STATES = 128  # of an automaton
MAX_TERMS = 8_000
MAX_PATTERN = 4_000  # characters of one that is read
MAX_CHARS = 30_000  # of a pattern that is written from an automaton
_QUANTIFIER = re.compile(r"([*+?])|\{(\d+)(,?)(\d*)\}")
_RANGE = re.compile(rf"({ONE})(?:-({ONE}))?")
_START, _BEHIND, _UNKNOWN = "at the start", "behind it", "unknown"  # positions in a text


@dataclass(frozen=True, slots=True)
class Texts:
    """An expression: texts in which a pattern of ECMA-262 is found, or a combination of such sets."""

    operator: str  # "pattern", "not", "and" or "or"
    parts: tuple[Any, ...]

    @classmethod
    def of(cls, pattern: str) -> Texts:
        return cls("pattern", (pattern,))

    def __invert__(self) -> Texts:
        return Texts("not", (self,))

    def __and__(self, other: Texts) -> Texts:
        return Texts("and", (self, other))

    def __or__(self, other: Texts) -> Texts:
        return Texts("or", (self, other))


@lru_cache(maxsize=256)
def pattern_of(texts: Texts) -> str | None:
    """A pattern of ECMA-262 of the texts, with anchors; None if there are none. Raises UnsupportedPattern."""
    return _automaton(texts).pattern()


def has_lookahead(pattern: str) -> bool:
    return any(opening in pattern for opening in LOOKAHEADS)


def rust_pattern(pattern: str) -> str:
    """The pattern in the syntax of grammar backends (Rust), unanchored as before.

    Raises UnsupportedPattern.
    """
    text = translated(pattern)
    if has_lookahead(pattern):
        text = translated(pattern_of(Texts.of(pattern)) or "[]")
    return text


# Syntax trees: ("set", ranges), ("seq", parts), ("or", parts), ("repeat", part, low, high), ("ahead", part),
# ("not ahead", part), ("^",), ("$",).


class _Parser:
    """Reads a pattern in the syntax of the translation."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def run(self) -> Any:
        tree = self._choice()
        if self._at < len(self._text):
            raise UnsupportedPattern("an unbalanced parenthesis")
        return tree

    def _choice(self) -> Any:
        parts = [self._sequence()]
        while self._text.startswith("|", self._at):
            self._at += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else ("or", parts)

    def _sequence(self) -> Any:
        parts: list[Any] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._atom()
            if count := _QUANTIFIER.match(self._text, self._at):
                self._at = count.end()
                sign, low, comma, high = count.groups()
                if sign:
                    part = ("repeat", part, int(sign == "+"), 1 if sign == "?" else None)
                else:
                    part = ("repeat", part, int(low), (int(high) if high else None) if comma else int(low))
            parts.append(part)
        return ("seq", parts)

    def _atom(self) -> Any:
        for opening, kind in (("(?:", ""), ("(?=", "ahead"), ("(?!", "not ahead")):
            if self._text.startswith(opening, self._at):
                self._at += 3
                inner = self._choice()
                if not self._text.startswith(")", self._at):
                    raise UnsupportedPattern("a group without end")
                self._at += 1
                return (kind, inner) if kind else inner
        character = self._text[self._at]
        if character in "^$":
            self._at += 1
            return (character,)
        if character == "[":
            end = self._text.index("]", self._at)
            members = self._text[self._at + 1 : end]
            self._at = end + 1
            if r"\p" in members or r"\P" in members:
                raise UnsupportedPattern("a property of characters beside a negation")
            ranges = [
                (code_of(first), code_of(last or first))
                for first, last in _RANGE.findall(members.removeprefix("^"))
            ]
            return ("set", outside(ranges) if members.startswith("^") else tuple(ranges))
        one = re.compile(ONE + r"|\\[{}\]]").match(self._text, self._at)
        if one is None:
            raise UnsupportedPattern(f"{character!r} at {self._at}")
        self._at = one.end()
        return ("set", ((code_of(one[0]), code_of(one[0])),))


def _sets(tree: Any) -> Iterator[Ranges]:
    if tree[0] == "set":
        yield tree[1]
    elif tree[0] in ("seq", "or"):
        for part in tree[1]:
            yield from _sets(part)
    elif len(tree) > 1:
        yield from _sets(tree[1])


def _is_plain(tree: Any) -> bool:
    """Whether a tree has no anchors and no lookaheads."""
    if tree[0] in ("seq", "or"):
        return all(map(_is_plain, tree[1]))
    return tree[0] == "set" or (tree[0] == "repeat" and _is_plain(tree[1]))


def _may_be_empty(tree: Any) -> bool:
    match tree[0]:
        case "set":
            return False
        case "seq":
            return all(map(_may_be_empty, tree[1]))
        case "or":
            return any(map(_may_be_empty, tree[1]))
        case "repeat":
            return tree[2] == 0 or _may_be_empty(tree[1])
    return True


class _Terms:
    """Terms by number, equal ones once. Sets of characters are bits, one of each class of the alphabet."""

    def __init__(self, num_classes: int) -> None:
        self._terms: list[tuple[Any, ...]] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._derivatives: dict[tuple[int, int], int] = {}
        self._bodies: list[int] = []  # of loops
        self.every = (1 << num_classes) - 1
        self.none = self._number(("set", 0))
        self.empty = self._number(("empty",))
        self.any = self._number(("star", self._number(("set", self.every))))

    def _number(self, term: tuple[Any, ...]) -> int:
        if term not in self._numbers:
            if len(self._terms) >= MAX_TERMS:
                raise _too_large()
            self._numbers[term] = len(self._terms)
            self._terms.append(term)
        return self._numbers[term]

    def set(self, bits: int) -> int:
        return self._number(("set", bits))

    def sequence(self, first: int, second: int) -> int:
        if self.none in (first, second):
            return self.none
        if first == self.empty:
            return second
        if second == self.empty:
            return first
        kind, *parts = self._terms[first]
        if kind == "seq":
            return self.sequence(parts[0], self.sequence(parts[1], second))
        if first == self.any and (second == self.any or self._terms[second][:2] == ("seq", self.any)):
            return second
        return self._number(("seq", first, second))

    def star(self, term: int) -> int:
        if term in (self.none, self.empty):
            return self.empty
        return term if self._terms[term][0] == "star" else self._number(("star", term))

    def loop(self, rest: int) -> int:
        """A term that is equal to its body: `rest`, or at least one character before the loop itself."""
        self._bodies.append(rest)
        return self._number(("loop", len(self._bodies) - 1))

    def set_body(self, loop: int, body: int) -> None:
        self._bodies[self._terms[loop][1]] = body

    def complement(self, term: int) -> int:
        if term in (self.none, self.any):
            return self.any if term == self.none else self.none
        kind, *parts = self._terms[term]
        return int(parts[0]) if kind == "not" else self._number(("not", term))

    def union(self, terms: Iterable[int]) -> int:
        parts, bits = set(), 0
        for term in self._flat("or", terms):
            kind, *inner = self._terms[term]
            if kind == "set":
                bits |= inner[0]
            else:
                parts.add(term)
        if self.any in parts:
            return self.any
        if bits:
            parts.add(self.set(bits))
        if not parts:
            return self.none
        return parts.pop() if len(parts) == 1 else self._number(("or", frozenset(parts)))

    def intersection(self, terms: Iterable[int]) -> int:
        parts = set(self._flat("and", terms)) - {self.any}
        if self.none in parts or any(self.complement(part) in parts for part in parts):
            return self.none
        if not parts:
            return self.any
        return parts.pop() if len(parts) == 1 else self._number(("and", frozenset(parts)))

    def _flat(self, kind: str, terms: Iterable[int]) -> Iterator[int]:
        for term in terms:
            if self._terms[term][0] == kind:
                yield from self._terms[term][1]
            else:
                yield term

    def has_empty(self, number: int) -> bool:
        kind, *parts = self._terms[number]
        match kind:
            case "set":
                return False
            case "seq" | "and":
                return all(map(self.has_empty, parts[0] if kind == "and" else parts))
            case "or":
                return any(map(self.has_empty, parts[0]))
            case "not":
                return not self.has_empty(parts[0])
            case "loop":
                return self.has_empty(self._bodies[parts[0]])
        return True

    def derivative(self, number: int, index: int) -> int:
        """The texts that follow a character of a class of the alphabet."""
        key = (number, index)
        if key not in self._derivatives:
            self._derivatives[key] = self._derived(number, index)
        return self._derivatives[key]

    def _derived(self, number: int, index: int) -> int:
        kind, *parts = self._terms[number]
        match kind:
            case "set":
                return self.empty if parts[0] >> index & 1 else self.none
            case "seq":
                first, second = parts
                derived = self.sequence(self.derivative(first, index), second)
                if self.has_empty(first):
                    derived = self.union((derived, self.derivative(second, index)))
                return derived
            case "star":
                return self.sequence(self.derivative(parts[0], index), number)
            case "or":
                return self.union(self.derivative(part, index) for part in parts[0])
            case "and":
                return self.intersection(self.derivative(part, index) for part in parts[0])
            case "not":
                return self.complement(self.derivative(parts[0], index))
            case "loop":
                return self.derivative(self._bodies[parts[0]], index)
        return self.none


class _Builder:
    """Terms of expressions over the classes of their alphabet."""

    def __init__(self, texts: Texts) -> None:
        self._trees: dict[str, Any] = {}
        self._read(texts)
        cuts = {0, LAST_CODE + 1}
        for ranges in [
            *(ranges for tree in self._trees.values() for ranges in _sets(tree)),
            UNWRITABLE_CODES,
        ]:
            cuts |= {cut for first, last in ranges for cut in (first, last + 1)}
        self._cuts = sorted(cuts)
        spans = list(zip(self._cuts, self._cuts[1:], strict=False))
        # Spans that no set tells apart are one class.
        members = defaultdict(list)
        sets = [ranges for tree in self._trees.values() for ranges in _sets(tree)]
        for first, end in spans:
            if not _has(UNWRITABLE_CODES, first):
                members[tuple(_has(ranges, first) for ranges in sets)].append((first, end - 1))
        self.classes: list[Ranges] = [tuple(spans) for spans in members.values()]
        self.terms = _Terms(len(self.classes))
        self.start = self._expression(texts)

    def _read(self, texts: Texts) -> None:
        for part in texts.parts:
            if isinstance(part, Texts):
                self._read(part)
            elif len(part) > MAX_PATTERN:
                raise UnsupportedPattern(f"a pattern of more than {MAX_PATTERN} characters beside a negation")
            elif part not in self._trees:
                self._trees[part] = _Parser(translated(part)).run()

    def _expression(self, texts: Texts) -> int:
        if texts.operator == "pattern":
            return self._search(self._trees[texts.parts[0]])
        parts = [self._expression(part) for part in texts.parts]
        match texts.operator:
            case "not":
                return self.terms.complement(parts[0])
            case "and":
                return self.terms.intersection(parts)
        return self.terms.union(parts)

    def _search(self, tree: Any) -> int:
        terms = self.terms
        later = self._term(tree, terms.any, _BEHIND)
        before = terms.sequence(terms.set(terms.every), terms.any)
        return terms.union((self._term(tree, terms.any, _START), terms.sequence(before, later)))

    def _term(self, tree: Any, rest: int, position: str) -> int:
        """Texts that begin with a match of the tree, before one of the term `rest`."""
        terms = self.terms
        match tree:
            case ("set", ranges):
                bits = sum(
                    1 << index for index, spans in enumerate(self.classes) if _has(ranges, spans[0][0])
                )
                return terms.sequence(terms.set(bits), rest)
            case ("seq", parts):
                positions = []
                for part in parts:
                    positions.append(position)
                    if position == _START and not _is_assertion(part):
                        position = _UNKNOWN if _may_be_empty(part) else _BEHIND
                for part, before in zip(reversed(parts), reversed(positions), strict=True):
                    rest = self._term(part, rest, before)
                return rest
            case ("or", parts):
                return terms.union(self._term(part, rest, position) for part in parts)
            case ("ahead", part):
                return terms.intersection((self._term(part, terms.any, position), rest))
            case ("not ahead", part):
                return terms.intersection((terms.complement(self._term(part, terms.any, position)), rest))
            case ("$",):
                return terms.empty if terms.has_empty(rest) else terms.none
            case ("^",):
                if position == _UNKNOWN:
                    raise UnsupportedPattern("an anchor behind a part that may be empty")
                return rest if position == _START else terms.none
        _, part, low, high = tree
        if not _is_plain(part):
            return self._repeated(part, low, high, rest, position)
        one = self._term(part, terms.empty, _BEHIND)
        repeated = terms.star(one) if high is None else terms.empty
        for _ in range(0 if high is None else high - low):
            repeated = terms.union((terms.empty, terms.sequence(one, repeated)))
        for _ in range(low):
            repeated = terms.sequence(one, repeated)
        return terms.sequence(repeated, rest)

    def _repeated(self, part: Any, low: int, high: int | None, rest: int, position: str) -> int:
        """A repetition whose anchors and lookaheads see the text behind each repetition."""
        terms = self.terms
        is_empty = _may_be_empty(part)
        behind = _UNKNOWN if is_empty and position != _BEHIND else _BEHIND
        if high is None and is_empty:
            raise UnsupportedPattern("an anchor or lookahead in a part that may be empty, repeated at will")
        term = rest
        num_optional = 1 if high is None else high - low
        if high is None:
            term = terms.loop(rest)
            terms.set_body(term, terms.union((rest, self._term(part, term, behind))))
        for index in reversed(range(low + num_optional)):
            one = self._term(part, term, behind if index else position)
            term = one if index < low else terms.union((rest, one))
        return term


def _is_assertion(tree: Any) -> bool:
    return tree[0] in ("^", "ahead", "not ahead")


def _has(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


@dataclass(frozen=True, slots=True)
class _Automaton:
    """States by number, the first is 0; for each the next state by a class of the alphabet."""

    classes: list[Ranges]
    next_states: list[list[int]]
    accepting: list[bool]

    def _alive(self) -> set[int]:
        """States from which an accepting one is reached."""
        before = defaultdict(set)
        for state, following in enumerate(self.next_states):
            for other in following:
                before[other].add(state)
        alive, todo = set(), [state for state, is_end in enumerate(self.accepting) if is_end]
        while todo:
            state = todo.pop()
            if state not in alive:
                alive.add(state)
                todo += before[state]
        return alive

    def pattern(self) -> str | None:
        alive = self._alive()
        if 0 not in alive:
            return None
        begin, end = -1, -2
        edges: dict[int, dict[int, str]] = {begin: {0: ""}, end: {}}
        for state in alive:
            spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for ranges, other in zip(self.classes, self.next_states[state], strict=True):
                if other in alive:
                    spans[other] += ranges
            edges[state] = {other: written_class(ranges) for other, ranges in spans.items()}
            if self.accepting[state]:
                edges[state][end] = ""
        open_states = set(alive)
        while open_states:
            state = min(open_states, key=lambda one: _cost(edges, one))
            open_states.remove(state)
            _eliminate(edges, state)
        text = edges[begin][end]
        return f"^(?:{text})$"


def _cost(edges: dict[int, dict[int, str]], state: int) -> int:
    entries = sum(len(following[state]) + 1 for other, following in edges.items() if state in following)
    exits = sum(len(text) + 1 for text in edges[state].values())
    return entries * exits


def _eliminate(edges: dict[int, dict[int, str]], state: int) -> None:
    """Replace a state by the paths through it."""
    following = edges.pop(state)
    loop = following.pop(state, None)
    loops = "" if not loop else f"{_group(loop)}*"
    for other in edges.values():
        entry = other.pop(state, None)
        if entry is None:
            continue
        for target, exit_ in following.items():
            path = _side(entry) + loops + _side(exit_)
            other[target] = path if target not in other else _either(other[target], path)
            if len(other[target]) > MAX_CHARS:
                raise _too_large()


def _either(first: str, second: str) -> str:
    if "" in (first, second):
        return _group(first or second) + "?"
    return f"{first}|{second}"


def _side(text: str) -> str:
    """The text as a part of a sequence."""
    depth = 0
    in_class = False
    for index, character in enumerate(text):
        if text[index - 1 : index] == "\\" and index:
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            depth += {"(": 1, ")": -1}.get(character, 0)
            if character == "|" and not depth:
                return f"(?:{text})"
    return text


def _group(text: str) -> str:
    is_one = re.fullmatch(rf"\[[^\]]*\]|{ONE}", text)
    return text if is_one else f"(?:{text})"


def _automaton(texts: Texts) -> _Automaton:
    try:
        return _minimal(_explored(_Builder(texts)))
    except RecursionError:
        raise _too_large() from None


def _too_large() -> UnsupportedPattern:
    return UnsupportedPattern("a negation or lookahead with a large automaton")


def _explored(builder: _Builder) -> _Automaton:
    terms, numbers = builder.terms, {builder.start: 0}
    todo, table = [builder.start], []
    for term in todo:  # grows
        following = []
        for index in range(len(builder.classes)):
            derived = terms.derivative(term, index)
            if derived not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise _too_large()
                numbers[derived] = len(numbers)
                todo.append(derived)
            following.append(numbers[derived])
        table.append(following)
    return _Automaton(builder.classes, table, [terms.has_empty(term) for term in todo])


def _minimal(automaton: _Automaton) -> _Automaton:
    """The automaton with equivalent states joined (Moore)."""
    groups: Sequence[int] = [int(is_end) for is_end in automaton.accepting]
    while True:
        keys = [
            (groups[state], *(groups[other] for other in following))
            for state, following in enumerate(automaton.next_states)
        ]
        numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        joined = [numbers[key] for key in keys]
        if len(numbers) == len(set(groups)):
            break
        groups = joined
    first_of = {group: state for state, group in reversed(list(enumerate(joined)))}
    states = [first_of[group] for group in range(len(numbers))]
    return _Automaton(
        automaton.classes,
        [[joined[other] for other in automaton.next_states[state]] for state in states],
        [automaton.accepting[state] for state in states],
    )
