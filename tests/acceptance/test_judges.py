"""The judges of the languages: what they accept, what may still become a text, what is limited."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import triptych_cli.tiny_model
from engine_svc.features.structured_output.backends.backend import Vocabulary
from tests.acceptance.rig.languages import (
    Completions,
    Language,
    lark_language,
    limited,
    make_languages,
    regex_language,
    schema_language,
)

TOKENIZER_JSON = (Path(triptych_cli.tiny_model.__file__).parent / "weights" / "tokenizer.json").read_text()
NUMBERS = schema_language("schema", {"type": "array", "items": {"type": "integer"}, "maxItems": 2})
NESTED = lark_language('start: "(" start ")" | "x"\n')


@pytest.mark.parametrize(
    ("language", "text", "is_accepted"),
    [
        (NUMBERS, "[1, 2]", True),
        (NUMBERS, "[1, 2, 3]", False),
        (NUMBERS, "[1, 2", False),
        (regex_language("a{2}"), "aa", True),
        (regex_language("a{2}"), "aaa", False),
        (NESTED, "((x))", True),
        (NESTED, "((x)", False),
    ],
)
def test_a_text_is_accepted_where_it_is_one_of_the_language(
    language: Language, text: str, is_accepted: bool
) -> None:
    assert language.accepts(text) == is_accepted


@pytest.mark.parametrize(
    ("language", "text", "is_viable"),
    [(NUMBERS, "[1, ", True), (NUMBERS, "[1, 2,", False), (NESTED, "((", True), (NESTED, "x(", False)],
)
def test_a_cut_text_is_viable_where_a_text_of_the_language_begins_with_it(
    language: Language, text: str, is_viable: bool
) -> None:
    with closing(Completions(Vocabulary(TOKENIZER_JSON, 2048, (0,)))) as completions:
        assert completions.is_viable(language, completions.encode(text), text) == is_viable


def test_the_same_seed_makes_the_same_languages() -> None:
    first, second = (make_languages(8, 4, 4) for _ in range(2))
    assert [one.constraint for one in first] == [one.constraint for one in second]
    assert {one.kind for one in first} == {"schema", "regex", "Lark"}


def test_a_public_schema_gets_limits_where_it_has_none() -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "sizes": {"type": "array", "items": {"type": "number", "minimum": 5}},
        },
    }
    validator = Draft202012Validator(limited(schema))
    assert validator.is_valid({"name": "short", "sizes": [5, 6]})
    for text in ('{"name": "much too long"}', '{"sizes": [5, 6, 7]}', '{"sizes": [5000]}', '{"more": 1}'):
        assert not validator.is_valid(json.loads(text))
