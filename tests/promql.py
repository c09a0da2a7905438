"""What an expression of Prometheus asks for: its metrics, with the labels that it compares or groups by."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
  | (?P<range>\[[^\]]*\])
  | (?P<number>[0-9][0-9._eE]*[smhd]?)
  | (?P<name>[A-Za-z_:][A-Za-z0-9_:]*)
  | (?P<operator>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},])
    """,
    re.VERBOSE,
)
_GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
_WORDS = {*_GROUPING, "and", "or", "unless", "bool", "offset"}


@dataclass(slots=True)
class Selector:
    """One metric of an expression. matchers: operator and value by label."""

    metric: str
    matchers: dict[str, tuple[str, str]] = field(default_factory=dict)

    def selects(self, labels: Mapping[str, str]) -> bool:
        return all(
            name in labels and _COMPARE[operator](labels[name], value)
            for name, (operator, value) in self.matchers.items()
        )


_COMPARE = {
    "=": str.__eq__,
    "!=": str.__ne__,
    "=~": lambda label, pattern: re.fullmatch(pattern, label) is not None,
    "!~": lambda label, pattern: re.fullmatch(pattern, label) is None,
}


def parse(expression: str) -> tuple[list[Selector], set[str]]:
    """The selectors, and the labels of all groupings. Raises ValueError at what it does not know."""
    tokens = list(_tokens(expression))
    selectors: list[Selector] = []
    grouped: set[str] = set()
    position = 0
    while position < len(tokens):
        kind, text = tokens[position]
        following = tokens[position + 1][1] if position + 1 < len(tokens) else ""
        position += 1
        if kind != "name":
            continue
        if text in _GROUPING and following == "(":
            end = tokens.index(("operator", ")"), position)
            grouped.update(name for kind, name in tokens[position + 1 : end] if kind == "name")
            position = end + 1
        elif text not in _WORDS and following not in ("(", "by", "without"):
            selector = Selector(text)
            if following == "{":
                end = tokens.index(("operator", "}"), position)
                inside = [token for _, token in tokens[position + 1 : end] if token != ","]
                for name, operator, value in zip(*[iter(inside)] * 3, strict=True):
                    selector.matchers[name] = (operator, value[1:-1])
                position = end + 1
            selectors.append(selector)
    return selectors, grouped


def _tokens(expression: str) -> Iterator[tuple[str, str]]:
    position = 0
    while position < len(expression):
        found = _TOKEN.match(expression, position)
        if found is None or found.lastgroup is None:
            raise ValueError(f"not known at {position}: {expression[position : position + 20]!r}")
        position = found.end()
        if found.lastgroup not in ("space", "range"):
            yield found.lastgroup, found.group()
