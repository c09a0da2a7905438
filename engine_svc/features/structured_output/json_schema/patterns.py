"""Regular expressions of JSON schemas (ECMA-262) in the syntax of grammar backends (Rust)."""

from __future__ import annotations

import re
from collections.abc import Iterable

ANY = "(?s:.)"
_CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff",
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_QUANTIFIER = re.compile(r"\{\d+(?:,\d*)?\}")
_CODE = re.compile(r"\\(?:x..|u....|U........)")
# Parts of a translated pattern.
_ONE = r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}|\\U[0-9a-f]{8}|[^\\\[\](){}|*+?.]"
_SINGLE = re.compile(rf"{_ONE}|\\[{{}}\]]")
_RANGE = re.compile(rf"({_ONE})(?:-({_ONE}))?")
_CLASS = re.compile(rf"\[((?:{_ONE})+)\]")
_COUNT = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_LOOKAROUND = re.compile(r"\(\?(=|!|<=|<!)")
_NAMED_GROUP = re.compile(r"\(\?P?<[A-Za-z_$][\w$]*>")


class UnsupportedPattern(ValueError):
    """The message names the construct."""


def rust_pattern(pattern: str) -> str:
    """The same language in Rust's syntax, unanchored as before; UnsupportedPattern by name."""
    return _Translation(pattern).run()


def pattern_without(texts: Iterable[str]) -> str:
    """An ECMA pattern of all strings but these."""
    return f"^{_complement(set(texts))}$"


def literal(text: str) -> str:
    """An ECMA pattern of this text, not anchored."""
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


def texts_of(pattern: str, most: int) -> list[str]:
    """All texts of a translated pattern between ^ and $; [] if there are more than `most`, or it is no such.

    It may be no such to this search alone.
    """
    inner = pattern[1:-1]
    if not (pattern.startswith("^") and pattern.endswith("$")) or "^" in inner or "$" in inner:
        return []
    try:
        return _Texts(inner, most).run()
    except UnsupportedPattern:
        return []


class _Texts:
    """Enumerates a pattern in the syntax of the translation, without anchors."""

    def __init__(self, pattern: str, most: int) -> None:
        self._text = pattern
        self._most = most
        self._at = 0

    def run(self) -> list[str]:
        found = self._sequence()
        if self._at < len(self._text):
            raise UnsupportedPattern("a choice to which an anchor does not belong")
        return found

    def _sequence(self) -> list[str]:
        found = [""]
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            part = self._atom()
            least, most = 1, 1
            if count := _COUNT.match(self._text, self._at):
                self._at = count.end()
                least, most = self._limits(count[0])
            repeated = self._product([""], part, least)
            choices = dict.fromkeys(repeated)
            for _ in range(most - least):
                repeated = self._product(repeated, part, 1)
                choices.update(dict.fromkeys(repeated))
            found = self._product(found, list(choices), 1)
        return found

    def _product(self, texts: list[str], part: list[str], count: int) -> list[str]:
        for _ in range(count):
            texts = self._few([text + more for text in texts for more in part])
        return texts

    def _few(self, texts: Iterable[str]) -> list[str]:
        found = list(dict.fromkeys(texts))
        if len(found) > self._most:
            raise UnsupportedPattern(f"more than {self._most} texts")
        return found

    def _limits(self, quantifier: str) -> tuple[int, int]:
        if quantifier == "?":
            return 0, 1
        least, comma, most = quantifier.strip("{}").partition(",")
        if not least.isdecimal() or (comma and not most) or int(most or least) > self._most:
            raise UnsupportedPattern(f"the quantifier {quantifier}")
        return int(least), int(most or least)

    def _atom(self) -> list[str]:
        if self._text.startswith("(?:", self._at):
            found: list[str] = []
            while self._text[self._at] != ")":
                self._at += 3 if self._text[self._at] == "(" else 1
                found = self._few([*found, *self._sequence()])
            self._at += 1
            return found
        if single := _SINGLE.match(self._text, self._at):
            self._at = single.end()
            return [_character(single[0])]
        if (members := _CLASS.match(self._text, self._at)) is None:
            raise UnsupportedPattern("a part with many texts")
        self._at = members.end()
        codes: list[int] = []
        for first, last in _RANGE.findall(members[1]):
            low, high = ord(_character(first)), ord(_character(last or first))
            if high - low >= self._most:
                raise UnsupportedPattern(f"more than {self._most} texts")
            codes += range(low, high + 1)
        return self._few(map(chr, codes))


def _character(text: str) -> str:
    return chr(int(text.lstrip("\\xuU"), 16)) if _CODE.fullmatch(text) else text.removeprefix("\\")


class _Translation:
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
        if found := _QUANTIFIER.match(self._text, self._at):
            self._quantifier(found[0])
            return
        self._at += 1
        if character in "*+?":
            self._at -= 1
            self._quantifier(character)
        elif character == ".":
            self._out.append(r"[^\n\r\u2028\u2029]")
        elif character in "{}]":
            self._out.append("\\" + character)
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
        if found := _LOOKAROUND.match(self._text, self._at):
            raise UnsupportedPattern(f"lookaround (?{found[1]}")
        if found := _NAMED_GROUP.match(self._text, self._at):
            self._at += len(found[0])
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
        found = self._member()
        if found in _CLASSES.values():
            return f"[{found}]"
        return found

    def _member(self) -> str:
        """An escape, in or outside of a class: what stands for it in brackets, or a nested class."""
        letter = self._text[self._at + 1 : self._at + 2]
        self._at += 2
        if not letter:
            raise UnsupportedPattern("a backslash at the end")
        if letter in _CLASSES:
            return _CLASSES[letter]
        if letter.lower() in _CLASSES:
            return f"[^{_CLASSES[letter.lower()]}]"
        if letter in "pP":
            found = re.compile(r"\{[\w=]+\}").match(self._text, self._at)
            if not found:
                raise UnsupportedPattern(f"\\{letter} without a property")
            self._at += len(found[0])
            return f"\\{letter}{found[0]}"
        return _code(self._character(letter))

    def _character(self, letter: str) -> int:
        """Code of an escaped character whose backslash and letter are read."""
        if letter in _CONTROLS:
            return ord(_CONTROLS[letter])
        if letter == "c" and (found := re.compile("[A-Za-z]").match(self._text, self._at)):
            self._at += 1
            return ord(found[0]) % 32
        if letter == "x" and (found := re.compile("[0-9A-Fa-f]{2}").match(self._text, self._at)):
            self._at += 2
            return int(found[0], 16)
        if letter == "u":
            if found := re.compile(r"\{([0-9A-Fa-f]{1,6})\}").match(self._text, self._at):
                self._at += len(found[0])
                return int(found[1], 16)
            if found := re.compile(r"([dD][89abAB]..)\\u([dD][c-fC-F]..)").match(self._text, self._at):
                self._at += len(found[0])
                high, low = int(found[1], 16), int(found[2], 16)
                return 0x10000 + ((high & 0x3FF) << 10) + (low & 0x3FF)
            if found := re.compile("[0-9A-Fa-f]{4}").match(self._text, self._at):
                self._at += 4
                return int(found[0], 16)
        if letter.isalnum():
            raise UnsupportedPattern(f"the escape \\{letter}")
        return ord(letter)

    def _class(self) -> str:
        self._at += 1
        is_negated = self._text.startswith("^", self._at)
        self._at += is_negated
        if self._text.startswith("]", self._at):
            self._at += 1
            return ANY if is_negated else r"[^\x00-\U0010ffff]"
        members: list[str] = []
        while True:
            if self._at >= len(self._text):
                raise UnsupportedPattern("a character class without end")
            if self._text[self._at] == "]":
                self._at += 1
                return ("[^" if is_negated else "[") + "".join(members) + "]"
            first = self._class_member()
            is_range = (
                self._text.startswith("-", self._at)
                and self._text[self._at + 1 : self._at + 2] not in ("]", "")
                and _CODE.fullmatch(first)
            )
            if is_range:
                self._at += 1
                last = self._class_member()
                if not _CODE.fullmatch(last):
                    raise UnsupportedPattern("a range that ends with a class")
                first = f"{first}-{last}"
            members.append(first)

    def _class_member(self) -> str:
        character = self._text[self._at]
        if character != "\\":
            self._at += 1
            return _code(ord(character))
        if self._text.startswith("\\b", self._at):
            self._at += 2
            return _code(8)
        return self._member()


def _code(code: int) -> str:
    if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
        raise UnsupportedPattern(f"the code {code:#x}, which is no character")
    # Spelled so that Python reads it, too.
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
