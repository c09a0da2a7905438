"""JSON followed character by character, against the standard library's parser."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from frontend_svc.parsers.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def accepts(text: str, sizes: list[int]) -> bool:
    """Whether `text` is one whole value, fed in chunks of these sizes."""
    scanner, at, turn = JsonScanner(), 0, 0
    while at < len(text):
        chunk = text[at : at + sizes[turn % len(sizes)]]
        num_taken = scanner.scan(chunk, 0)
        at, turn = at + num_taken, turn + 1
        if num_taken < len(chunk) or scanner.is_broken:
            break
    return scanner.is_whole and not scanner.is_broken and at == len(text)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=int)
    except ValueError:
        return False
    return True


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.text(), VALUES),
    st.integers(0, 2),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=1),
)
def test_what_is_json_is_whole_at_its_last_character(value, indent, is_ascii, sizes):
    text = json.dumps(value, indent=indent or None, ensure_ascii=is_ascii)
    assert accepts(text, sizes)
    assert not accepts(text[:-1], sizes)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.text(alphabet='{}[]:,"\\u0e1-+.tf \nabn', max_size=12), st.lists(st.integers(1, 3), min_size=1))
@example("01", [1])
@example("1.e1", [1])
@example('"\\u00g0"', [1])
def test_it_accepts_what_the_standard_library_accepts(inner, sizes):
    text = '{"a":' + inner + "}"
    assert accepts(text, sizes) == is_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "{a:1}",
        "{'a':1}",
        '{"a":1,}',
        "[1,]",
        "[,1]",
        "tru ",
        "nul}",
        "+1",
        ".5",
        "1.",
        "-",
        "NaN",
        '"\n"',
        '"\\x"',
        '"\\u00e"',
        "]",
    ],
)
def test_what_is_no_json_is_not_whole(text):
    scanner = JsonScanner()
    scanner.scan(text + " ", 0)
    assert scanner.is_broken and not scanner.is_whole


@pytest.mark.parametrize("text", ["1", "-0.5e+10", "true", "null", '"\\u00e9"', "[]", "{}"])
def test_a_value_ends_before_what_follows_it(text):
    scanner = JsonScanner()
    assert scanner.scan(text + ",", 0) == len(text)
    assert scanner.is_whole
