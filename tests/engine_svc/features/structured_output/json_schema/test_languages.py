"""Patterns of complements, and of patterns with lookaheads: the texts that Python's search finds."""

from __future__ import annotations

import re
from itertools import product

import pytest

from engine_svc.features.structured_output.json_schema.languages import Texts, pattern_of, rust_pattern
from engine_svc.features.structured_output.json_schema.patterns import UnsupportedPattern, translated

TEXTS = ["".join(letters) for length in range(5) for letters in product('ab"\n', repeat=length)]
PATTERNS = [
    "", "^$", "a", "^a", "a$", "^a|b$", "^(a|b$)", "^[^a]*$", "^.$", "[^]b", "^(ab?)+$", "a{2}", "^a{0,2}$",
    "^a{2,}$", '^"|a$', "^(?:a|)b?$", "^(?!a)", "^(?!.*ab)", "^(?=.*a)(?=.*b)[ab]{2,3}$", "a(?!b)",
    "^(a(?=b)|b)", "(?!a$)", "^(?!a|b$).", "a(?!b|$)", "^(?!(?!a)b).", "[]",
    "^((?!ab).)*$", "^(?:(?!ab)a|b(?=a))+$", "^(a(?:(?!.*bb)[ab]*b)?)$", "(?:^a|b(?!b)){1,2}$", "^(?:a|b$)*$",
]  # fmt: skip


def found(pattern: str) -> list[bool]:
    expected = re.compile(pattern.replace("$", r"\Z").replace("[^]", r"[^\0]").replace("[]", r"[^\w\W]"))
    return [bool(expected.search(text)) for text in TEXTS]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_complement_has_the_other_texts(pattern):
    others = pattern_of(~Texts.of(pattern))
    is_found = found(pattern)
    assert found(translated(others or "[]")) == [not one for one in is_found]
    assert found(rust_pattern(pattern)) == is_found
    assert "(?=" not in rust_pattern(pattern) and "(?!" not in rust_pattern(pattern)


def test_sets_of_texts_are_joined():
    begins, ends = Texts.of("^a"), Texts.of("b$")
    both = [first and second for first, second in zip(found("^a"), found("b$"), strict=True)]
    assert found(translated(pattern_of(begins & ends) or "")) == both
    assert pattern_of(begins & ~(begins | ends)) is None


@pytest.mark.parametrize(
    "pattern",
    [
        "(?!(a{1000}){1000})", "^(?!(a|b)*a(a|b){20}$)", "(?!(a?){1000})", "(?!" + "a|b" * 400,
        "^a*(?!x{0,99999999}y)", "(" * 400 + "(?!a)" + ")" * 400, "((?!a)b?)*", "a(?!b",
    ],
)  # fmt: skip
def test_a_pattern_with_a_large_automaton_is_refused(pattern):
    with pytest.raises(UnsupportedPattern):
        rust_pattern(pattern)
