"""Regular expressions of JSON schemas (ECMA-262) in the syntax of grammar backends (Rust)."""

from __future__ import annotations

import re
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]  # of code points

LAST_CODE = 0x10FFFF
# Control characters without a short escape: no output has them.
UNWRITABLE_CODES: Ranges = ((0x00, 0x07), (0x0B, 0x0B), (0x0E, 0x1F), (0x7F, 0x7F))
UNWRITABLE = frozenset(chr(code) for first, last in UNWRITABLE_CODES for code in range(first, last + 1))
_NEVER = r"[^\x00-\U0010ffff]"
_CLASSES: dict[str, Ranges] = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": (
        (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
        (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
    ),
}  # fmt: skip
_LINE_ENDS = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}")
_LONG_CODE = re.compile(r"\\U0*([0-9a-f]+)")
_CODE = re.compile(r"\\(?:x..|u....|U........)")
# Parts of a translated pattern.
ONE = r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}|[^\\\[\](){}|*+?.]"
_SINGLE = re.compile(rf"{ONE}|\\[{{}}\]]")
_RANGE = re.compile(rf"({ONE})(?:-({ONE}))?")
_CLASS = re.compile(rf"\[((?:{ONE})+)\]")
_COUNT = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_LOOKBEHIND = re.compile(r"\(\?(<=|<!)")
LOOKAHEADS = ("(?=", "(?!")
_NAMED_GROUP = re.compile(r"\(\?P?<[A-Za-z_$][\w$]*>")


class UnsupportedPattern(ValueError):
    """A construct without a translation, which the message names."""


def translated(pattern: str) -> str:
    """The pattern in Rust's syntax, unanchored as before, but with lookaheads. Raises UnsupportedPattern."""
    return _Translation(pattern).run()


def ecma_pattern(pattern: str) -> str:
    """A translated pattern as one of ECMA-262 again."""
    return _LONG_CODE.sub(lambda code: f"\\u{{{code[1]}}}", pattern)


def pattern_without(texts: Iterable[str]) -> str:
    """An ECMA pattern of all strings except `texts`."""
    return f"^{_complement(set(texts))}$"


def literal(text: str) -> str:
    """An ECMA pattern of `text` alone, not anchored."""
    return "".join(_literal(character) for character in text)


def _literal(character: str) -> str:
    if character.isalnum() or ord(character) > 0x7F:
        return character
    return f"\\u{ord(character):04x}"


def _complement(texts: set[str]) -> str:
    alternatives = [] if "" in texts else [""]
    by_first: dict[str, set[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], set()).add(text[1:])
    if by_first:
        alternatives.append("[^" + "".join(map(_literal, sorted(by_first))) + "][^]*")
        alternatives += [_literal(first) + _complement(rest) for first, rest in sorted(by_first.items())]
    else:
        alternatives.append("[^]+")
    return "(?:" + "|".join(alternatives) + ")"


def texts_of(pattern: str, max_texts: int) -> list[str]:
    """All texts of a translated pattern between ^ and $; [] if there are more than `max_texts`.

    The same for every pattern that the search cannot enumerate.
    """
    inner = pattern[1:-1]
    if not (pattern.startswith("^") and pattern.endswith("$")) or "^" in inner or "$" in inner:
        return []
    try:
        return _Texts(inner, max_texts).run()
    except UnsupportedPattern:
        return []


class _Texts:
    """Enumerates a pattern in the syntax of the translation, without anchors."""

    def __init__(self, pattern: str, max_texts: int) -> None:
        self._text = pattern
        self._max_texts = max_texts
        self._at = 0

    def run(self) -> list[str]:
        texts = self._sequence()
        if self._at < len(self._text):
            raise UnsupportedPattern("a choice to which an anchor does not belong")
        return texts

    def _sequence(self) -> list[str]:
        texts = [""]
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._atom()
            low, high = 1, 1
            if count := _COUNT.match(self._text, self._at):
                self._at = count.end()
                low, high = self._limits(count[0])
            repeated = self._product([""], part, low)
            choices = dict.fromkeys(repeated)
            for _ in range(high - low):
                repeated = self._product(repeated, part, 1)
                choices.update(dict.fromkeys(repeated))
            texts = self._product(texts, list(choices), 1)
        return texts

    def _product(self, texts: list[str], part: list[str], count: int) -> list[str]:
        for _ in range(count):
            texts = self._distinct([text + more for text in texts for more in part])
        return texts

    def _distinct(self, texts: Iterable[str]) -> list[str]:
        distinct = list(dict.fromkeys(texts))
        if len(distinct) > self._max_texts:
            raise UnsupportedPattern(f"more than {self._max_texts} texts")
        return distinct

    def _limits(self, quantifier: str) -> tuple[int, int]:
        if quantifier == "?":
            return 0, 1
        low, comma, high = quantifier.strip("{}").partition(",")
        if not low.isdecimal() or (comma and not high) or int(high or low) > self._max_texts:
            raise UnsupportedPattern(f"the quantifier {quantifier}")
        return int(low), int(high or low)

    def _atom(self) -> list[str]:
        if self._text.startswith("(?:", self._at):
            texts: list[str] = []
            while self._text[self._at] != ")":
                self._at += 3 if self._text[self._at] == "(" else 1
                texts = self._distinct([*texts, *self._sequence()])
            self._at += 1
            return texts
        if single := _SINGLE.match(self._text, self._at):
            self._at = single.end()
            return [chr(code_of(single[0]))]
        if (members := _CLASS.match(self._text, self._at)) is None:
            raise UnsupportedPattern("a part with many texts")
        self._at = members.end()
        codes: list[int] = []
        for first, last in _RANGE.findall(members[1]):
            low, high = code_of(first), code_of(last or first)
            if high - low >= self._max_texts:
                raise UnsupportedPattern(f"more than {self._max_texts} texts")
            codes += range(low, high + 1)
        return self._distinct(map(chr, codes))


def code_of(text: str) -> int:
    """The code of one character of a translated pattern."""
    return int(text.lstrip("\\xuU"), 16) if _CODE.fullmatch(text) else ord(text.removeprefix("\\"))


class _Translation:
    """A pattern of ECMA-262, read once from left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._out: list[str] = []

    def run(self) -> str:
        while self._at < len(self._text):
            self._part()
        return "".join(self._out)

    def _part(self) -> None:
        character = self._text[self._at]
        if character == "\\":
            self._out.append(self._escape())
            return
        if character == "[":
            self._out.append(self._class())
            return
        if character == "(":
            self._group()
            return
        if quantifier := _QUANTIFIER.match(self._text, self._at):
            self._quantifier(quantifier[0])
            return
        self._at += 1
        if character in "*+?":
            self._at -= 1
            self._quantifier(character)
        elif character == ".":
            self._out.append(_class_text(_LINE_ENDS, is_negated=True))
        elif character in "{}]":
            self._out.append("\\" + character)
        elif character in UNWRITABLE:
            self._out.append(_NEVER)
        else:
            self._out.append(character)

    def _quantifier(self, text: str) -> None:
        self._at += len(text)
        following = self._text[self._at : self._at + 1]
        if following == "+":
            raise UnsupportedPattern("a possessive quantifier")
        self._out.append(text)
        if following == "?":
            self._at += 1  # lazy: the same language

    def _group(self) -> None:
        if lookbehind := _LOOKBEHIND.match(self._text, self._at):
            raise UnsupportedPattern(f"lookbehind (?{lookbehind[1]}")
        if self._text.startswith(LOOKAHEADS, self._at):
            self._out.append(self._text[self._at : self._at + 3])
            self._at += 3
            return
        if opening := _NAMED_GROUP.match(self._text, self._at):
            self._at += len(opening[0])
        elif self._text.startswith("(?:", self._at):
            self._at += 3
        elif self._text.startswith("(?", self._at):
            raise UnsupportedPattern(f"the group {self._text[self._at : self._at + 4]!r}")
        else:
            self._at += 1
        self._out.append("(?:")

    def _escape(self) -> str:
        letter = self._text[self._at + 1 : self._at + 2]
        if letter in ("b", "B"):
            raise UnsupportedPattern(f"the word boundary \\{letter}")
        if letter == "k" or (letter in "123456789" and letter):
            raise UnsupportedPattern(f"the backreference \\{letter}")
        member = self._member()
        if isinstance(member, str):
            return _class_text([], [member])
        return _class_text(member)

    def _member(self) -> Ranges | str:
        """An escape, inside or outside of a class, as ranges; a property as it is, without its ranges."""
        letter = self._text[self._at + 1 : self._at + 2]
        self._at += 2
        if not letter:
            raise UnsupportedPattern("a backslash at the end")
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter.lower() in _CLASSES:
            return outside(_CLASSES[letter.lower()])
        if letter in "pP":
            name = re.compile(r"\{[\w=]+\}").match(self._text, self._at)
            if not name:
                raise UnsupportedPattern(f"\\{letter} without a property")
            self._at += len(name[0])
            return f"\\{letter}{name[0]}"
        return _one(self._character(letter))

    def _character(self, letter: str) -> int:
        """The code of an escaped character, behind its backslash and letter."""
        if letter in _CONTROLS:
            return ord(_CONTROLS[letter])
        if letter == "c" and (control := re.compile("[A-Za-z]").match(self._text, self._at)):
            self._at += 1
            return ord(control[0]) % 32
        if letter == "x" and (digits := re.compile("[0-9A-Fa-f]{2}").match(self._text, self._at)):
            self._at += 2
            return int(digits[0], 16)
        if letter == "u":
            if digits := re.compile(r"\{([0-9A-Fa-f]{1,6})\}").match(self._text, self._at):
                self._at += len(digits[0])
                return int(digits[1], 16)
            if digits := re.compile(r"([dD][89abAB]..)\\u([dD][c-fC-F]..)").match(self._text, self._at):
                self._at += len(digits[0])
                high, low = int(digits[1], 16), int(digits[2], 16)
                return 0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF)
            if digits := re.compile("[0-9A-Fa-f]{4}").match(self._text, self._at):
                self._at += 4
                return int(digits[0], 16)
        if letter.isalnum():
            raise UnsupportedPattern(f"the escape \\{letter}")
        return ord(letter)

    def _class(self) -> str:
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        ranges: list[tuple[int, int]] = []
        properties: list[str] = []
        while not self._text.startswith("]", self._at):
            first = self._class_member()
            if isinstance(first, str):
                properties.append(first)
                continue
            is_range = (
                self._text.startswith("-", self._at)
                and self._text[self._at + 1 : self._at + 2] not in ("]", "")
                and len(first) == 1
                and first[0][0] == first[0][1]
            )
            if is_range:
                self._at += 1
                last = self._class_member()
                if isinstance(last, str) or len(last) > 1 or last[0][0] != last[0][1]:
                    raise UnsupportedPattern("a range that ends with a class")
                first = ((first[0][0], last[0][0]),)
                if first[0][0] > first[0][1]:
                    raise UnsupportedPattern("a range whose end is before its start")
            ranges += first
        self._at += 1
        return _class_text(ranges, properties, is_negated=is_negated)

    def _class_member(self) -> Ranges | str:
        if self._at >= len(self._text):
            raise UnsupportedPattern("a character class without end")
        character = self._text[self._at]
        if character != "\\":
            self._at += 1
            return _one(ord(character))
        if self._text.startswith("\\b", self._at):
            self._at += 2
            return _one(8)
        return self._member()


def _one(code: int) -> Ranges:
    _code(code)
    return ((code, code),)


def outside(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """The code points outside of ranges."""
    others, start = [], 0
    for first, last in sorted(ranges):
        if start < first:
            others.append((start, first - 1))
        start = max(start, last + 1)
    return (*others, *([(start, LAST_CODE)] if start <= LAST_CODE else ()))


def _class_text(
    ranges: Iterable[tuple[int, int]], properties: Iterable[str] = (), *, is_negated: bool = False
) -> str:
    """One of some characters in the syntax of the translation, without those that no output has.

    llguidance takes a class with all control characters for one with the quote and the backslash, and a
    character that cannot be written for any text.
    """
    members = "".join(properties)
    if is_negated:
        ranges = outside(outside([*ranges, *UNWRITABLE_CODES]))
        return f"[^{_range_text(ranges)}{members}]"
    ranges = outside([*UNWRITABLE_CODES, *outside(ranges)])
    if members:
        return f"[{_range_text(ranges)}{members}&&[^{_range_text(UNWRITABLE_CODES)}]]"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _code(ranges[0][0])
    return f"[{_range_text(ranges)}]" if ranges else _NEVER


def written_class(ranges: Iterable[tuple[int, int]]) -> str:
    """One of some characters in the syntax of ECMA-262."""
    ranges = outside(outside(ranges))
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _literal(chr(ranges[0][0]))
    return (
        "["
        + "".join(
            _ecma(first) if first == last else f"{_ecma(first)}-{_ecma(last)}" for first, last in ranges
        )
        + "]"
    )


def _ecma(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"


def _range_text(ranges: Ranges) -> str:
    return "".join(
        _code(first) if first == last else f"{_code(first)}-{_code(last)}" for first, last in ranges
    )


def _code(code: int) -> str:
    if 0xD800 <= code < 0xE000 or code > LAST_CODE:
        raise UnsupportedPattern(f"the code {code:#x}, which is no character")
    # Spelled so that Python reads it, too.
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
