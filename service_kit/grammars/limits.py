"""Limits on the text of constraints, for what the backends do not limit themselves."""

from __future__ import annotations

import re

from service_kit.grammars.constraint import Constraint, GrammarError, GrammarTooComplex

_REGEX_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?:\d*,)?(\d+)\}|\{\d+,\}|.", re.DOTALL)


def check_text(constraint: Constraint, *, max_bytes: int, max_nesting: int) -> None:
    name = constraint.kind.value
    texts = (constraint.text, *constraint.choices)
    size = sum(len(text.encode()) for text in texts)
    if size > max_bytes:
        raise GrammarTooComplex(f"{name} has {size} bytes, {max_bytes} are allowed")
    if any("\0" in text for text in texts):
        raise GrammarError(f"{name} contains a NUL character")
    depth = deepest = 0
    for character in constraint.text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > max_nesting:
        raise GrammarTooComplex(f"{name} is nested {deepest} levels deep, {max_nesting} are allowed")


def check_repetitions(pattern: str, name: str, max_parts: int) -> None:
    """Refuse nested counts like (a{1000}){1000}, which cost their product."""
    totals = [0]  # of each open group
    last = 0  # of the part that a count would repeat
    for found in _REGEX_PARTS.finditer(pattern):
        part = found[0]
        if part == "(":
            totals.append(0)
        elif part == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif found[1]:
            repeated = last * int(found[1])
            totals[-1] += repeated - last
            last = repeated
        elif part not in "?*+|":
            last = 1
            totals[-1] += 1
        if totals[-1] > max_parts:
            raise GrammarTooComplex(f"{name} repeats {totals[-1]} parts, {max_parts} are allowed")
