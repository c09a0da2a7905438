"""Backends over the embedded model's vocabulary and small ones: what they allow, refuse and forget."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import triptych_cli.tiny_model
from engine_svc.features.structured_output import llguidance_text
from engine_svc.features.structured_output.backends.backend import (
    GrammarBackend,
    Matcher,
    MatcherError,
    Vocabulary,
)
from engine_svc.features.structured_output.backends.llguidance_backend import LLGuidanceBackend
from engine_svc.features.structured_output.constraint import (
    MAX_WHITESPACE,
    Constraint,
    ConstraintKind,
    GrammarError,
    GrammarTooComplex,
    Spacing,
    Whitespace,
)

TOKENIZER_JSON = (Path(triptych_cli.tiny_model.__file__).parent / "weights" / "tokenizer.json").read_text()
TOKENIZER = Tokenizer.from_str(TOKENIZER_JSON)
EOS = 0
SIZE = 2100  # more than the tokenizer has
BACKENDS = ["llguidance", "xgrammar"]


@cache
def backend(name: str) -> GrammarBackend:
    return make_backend(name, Vocabulary(TOKENIZER_JSON, SIZE, (EOS,)))


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    if name == "llguidance":
        return LLGuidanceBackend(vocabulary)
    if find_spec("xgrammar") is None:
        pytest.skip("xgrammar is not installed")
    from engine_svc.features.structured_output.backends.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary)


def schema(document: object, **options: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(document), **options)


def regex(text: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, text)


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def accepts(name: str, constraint: Constraint, text: str) -> bool:
    matcher = backend(name).compile(constraint).matcher()
    tokens = ids(text)
    return matcher.accept(tokens) == len(tokens) and matcher.is_accepting


def allowed(matcher: Matcher, size: int = SIZE) -> list[int]:
    masks = torch.full((2, -(-size // 32)), -1, dtype=torch.int32)
    matcher.fill_mask(masks, 1)
    bits = (masks[1][:, None] >> torch.arange(32)) & 1
    return bits.flatten()[:size].nonzero().flatten().tolist()


def sampled(matcher: Matcher, seed: int, limit: int = 200) -> list[int] | None:
    """Tokens drawn evenly from what is allowed, without the end token; None if the limit is reached."""
    noise = random.Random(seed)
    tokens: list[int] = []
    for _ in range(limit):
        choices = allowed(matcher)
        token = noise.choice(choices)
        assert matcher.accept([token]) == 1
        if token == EOS:
            return tokens
        tokens.append(token)
    return None


def titled(title: object) -> dict[str, Any]:
    properties = {"title": {"const": title}}
    return {"type": "object", "properties": properties, "required": ["title"], "additionalProperties": False}


TITLES = {"type": "array", "prefixItems": [titled(1), titled(2)], "minItems": 2}
CASES = [
    # Schemas that differ in a property alone that is named like an annotation.
    (
        schema(TITLES),
        '[{"title": 1}, {"title": 2}]',
        '[{"title": 1}, {"title": 1}]',
    ),
    (
        schema({"type": "array", "prefixItems": [{"const": {"default": 1}}, {"const": {"default": 2}}]}),
        '[{"default":1}, {"default":2}]',
        '[{"default":1}, {"default":1}]',
    ),
    (
        Constraint(
            ConstraintKind.STRUCTURAL_TAG,
            json.dumps({"structures": [{"begin": "<", "schema": TITLES, "end": ">"}], "triggers": ["<"]}),
        ),
        '<[{"title": 1}, {"title": 2}]>',
        '<[{"title": 1}, {"title": 1}]>',
    ),
    (
        schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}),
        '{"a": 1}',
        '{"a": "x"}',
    ),
    (schema({"type": "object", "properties": {"a": {}}}), '{"b": 1}', "[1]"),
    (Constraint(ConstraintKind.JSON_OBJECT), '{"x": [1, null]}', "[]"),
    (regex("ab+c?"), "abb", "abba"),
    (regex("^a.c$"), "a.c", "a\nc"),
    (regex(r"[.]\.(?:b|c){2}"), "..bc", "a.bc"),
    (Constraint(ConstraintKind.CHOICE, choices=("yes", "yes!", "n/o (a|b)")), "n/o (a|b)", "no"),
    (Constraint(ConstraintKind.CHOICE, choices=("yes", "yes!")), "yes!", "ye"),
    (Constraint(ConstraintKind.GRAMMAR, 'root ::= "a" root "b" | "c"'), "aacbb", "aacb"),
    (Constraint(ConstraintKind.GRAMMAR, 'start: "a" start "b" | "c"'), "aacbb", "aacb"),
]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("constraint", "valid", "invalid"), CASES)
def test_a_constraint_allows_its_language_alone(name, constraint, valid, invalid):
    assert accepts(name, constraint, valid)
    assert not accepts(name, constraint, invalid)


def test_data_in_a_schema_is_not_read_as_keywords():
    data = {"multipleOf": True, "pattern": "(a{1000}){1000}", "required": list(range(5000))}
    document = {"default": data, "properties": {"multipleOf": {"type": "boolean"}}, "x": {"multipleOf": "y"}}
    assert accepts("llguidance", schema(document), '{"multipleOf": true}')


@pytest.mark.parametrize("name", BACKENDS)
def test_objects_without_additional_properties_where_the_request_says_so(name):
    document = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    closed = schema(document, has_additional_properties=False)
    assert accepts(name, closed, '{"a": {"b": 1}}')
    assert not accepts(name, closed, '{"a": {"c": 1}}')
    assert not accepts(name, closed, '{"c": 1}')
    assert accepts(name, schema(document), '{"c": 1}')


# Texts of one value, and the spacings that allow each.
SPACED = [
    ('{"a":[1,2]}', {Spacing.COMPACT, Spacing.FREE}),
    ('{"a": [1,2], "b":{"c": [1,"d"]}}', {Spacing.COMPACT, Spacing.FREE}),
    ('{"a": [1, 2], "b": {"c": [1, "d"]}}', {*Spacing}),
    ('{"a":  [1]}', {Spacing.FREE}),
    ('{"a" :[1]}', {Spacing.FREE}),
    ('{ "a":[1]}', {Spacing.FREE}),
    ('{"a":[1 ]}', {Spacing.FREE}),
    ('{"a":[1,\n2]}', {Spacing.FREE}),
    ('{"a": [1], "b": { }}', {Spacing.FREE}),
    ('{"a": [1], "b": [1,  2]}', {Spacing.FREE}),
    ('{"a": [1]}\n', set[Spacing]()),
]
LISTS = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "integer"}}},
    "additionalProperties": True,
}
LISTS_TAG = {"structures": [{"begin": "<f>", "schema": LISTS, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spacing", Spacing)
def test_a_space_is_optional_demanded_or_free_in_each_kind_of_json(name, spacing):
    whitespace = Whitespace(spacing)
    constraints = {
        "{}": schema(LISTS, whitespace=whitespace),
        "<f>{}</f>": Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(LISTS_TAG), whitespace=whitespace),
    }
    anything = Constraint(ConstraintKind.JSON_OBJECT, whitespace=whitespace)
    for text, spacings in SPACED:
        for form, constraint in constraints.items():
            is_allowed = accepts(name, constraint, form.replace("{}", text))
            assert is_allowed == (spacing in spacings), (form, text)
        assert accepts(name, anything, text) == (spacing in spacings), text


@pytest.mark.parametrize("name", BACKENDS)
def test_texts_of_a_schema_keep_what_looks_like_a_separator(name):
    document = {
        "type": "object",
        "properties": {'k", ': {"const": ": "}, "p": {"type": "string", "pattern": "^a, b: $"}},
        "required": ['k", ', "p"],
        "additionalProperties": False,
    }
    assert accepts(name, schema(document), r'{"k\", ":": ","p":"a, b: "}')
    assert not accepts(name, schema(document), r'{"k\",":": ","p":"a, b: "}')
    assert not accepts(name, schema(document), r'{"k\", ":":","p":"a, b: "}')
    assert not accepts(name, schema(document), r'{"k\", ":": ","p":"a,b: "}')


@pytest.mark.parametrize("name", BACKENDS)
def test_no_sampled_output_has_a_run_of_white_space_unless_it_is_free(name):
    documents = [LISTS, {"type": "array", "items": {"enum": ["a", 1, None]}}, TITLES, {"type": "object"}]
    runs = dict.fromkeys(Spacing, 0)
    for document, spacing in product(documents, Spacing):
        grammar = backend(name).compile(schema(document, whitespace=Whitespace(spacing)))
        for seed in range(4):
            tokens = sampled(grammar.matcher(), seed, limit=60)
            if tokens is None:
                continue
            text = TOKENIZER.decode(tokens)
            json.loads(text)
            outside = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
            runs[spacing] += len(re.findall(r"\s\s|[^\S ]", outside))
    assert runs[Spacing.COMPACT] == runs[Spacing.SINGLE] == 0 < runs[Spacing.FREE]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_run_of_free_whitespace_has_a_limit(name):
    document = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tag = {"structures": [{"begin": "<", "schema": document, "end": ">"}], "triggers": ["<"]}
    free = Whitespace(Spacing.FREE)
    longest = "\r\n" + " " * (MAX_WHITESPACE - 2)
    for form, constraint in (
        ("%s", schema(document, whitespace=free)),
        ("<%s>", Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(tag), whitespace=free)),
    ):
        for text in ('{%s"a":1}', '{"a"%s:1}', '{"a":%s1}', '{"a":1%s}'):
            assert accepts(name, constraint, form % (text % longest))
            assert not accepts(name, constraint, form % (text % (longest + " ")))


def test_whitespace_by_a_pattern():
    constraint = schema({"type": "array"}, whitespace=Whitespace(pattern="[ ]{0,1}"))
    assert accepts("llguidance", constraint, "[ 1, 2]")
    assert not accepts("llguidance", constraint, "[\n1]")
    assert not accepts("llguidance", constraint, "[  1]")


def marked_vocabulary(*, is_special: bool) -> Vocabulary:
    """Its last token is <call>."""
    tokenizer = Tokenizer.from_str(TOKENIZER_JSON)
    tokenizer.add_tokens([AddedToken("<call>", special=is_special)])
    return Vocabulary(tokenizer.to_str(), tokenizer.get_vocab_size(), (EOS,))


def marked(*, is_special: bool) -> tuple[LLGuidanceBackend, int]:
    """A vocabulary with a token <call>, and its id."""
    vocabulary = marked_vocabulary(is_special=is_special)
    return LLGuidanceBackend(vocabulary), vocabulary.size - 1


@pytest.mark.parametrize("is_special", [True, False])
def test_a_text_like_that_of_a_marker_is_spelled(is_special):
    """llguidance would allow the marker alone, and then refuse it."""
    compiled, marker = marked(is_special=is_special)
    matcher = compiled.compile(regex("x<call>y")).matcher()
    text = ""
    while not matcher.is_accepting:
        token = allowed(matcher, marker + 1)[0]
        assert matcher.accept([token]) == 1, text
        text += TOKENIZER.decode([token])
    assert text == "x<call>y"


TAG = {"structures": [{"begin": "<call>", "schema": {"const": 1}, "end": "."}], "triggers": ["<call>"]}


def test_an_error_lists_markers_as_they_are():
    compiled, _ = marked(is_special=True)
    with pytest.raises(GrammarError, match=r"unknown special token: \"<cal>\".*<call>"):
        compiled.compile(Constraint(ConstraintKind.GRAMMAR, "start: <cal>"))


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(TAG)),
        Constraint(ConstraintKind.GRAMMAR, 'start: <call> "1." // by its name, unlike "<call>"\n'),
    ],
)
def test_a_marker_stands_where_a_tag_or_a_grammar_names_it(constraint, is_special):
    compiled, marker = marked(is_special=is_special)
    tokens = [marker, *ids("1.")]
    assert compiled.compile(constraint).matcher().accept(tokens) == len(tokens)


@pytest.mark.parametrize("is_special", [True, False])
def test_a_marker_that_is_spelled_begins_a_tag_too(is_special):
    compiled, _ = marked(is_special=is_special)
    grammar = compiled.compile(Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(TAG)))
    for text, is_allowed in (("so <call>1.", True), ("so <call>2.", False)):
        tokens = ids(text)
        assert (grammar.matcher().accept(tokens) == len(tokens)) == is_allowed


OLD_TAGS = {
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "object", "additionalProperties": False}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "array", "items": {"type": "integer"}}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def new_tags(**options: bool) -> dict:
    tag = {
        "type": "tag",
        "begin": "<f=a>",
        "content": {"type": "json_schema", "json_schema": {"const": 1}},
        "end": "</f>",
    }
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag], **options},
    }


SEPARATED_TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "tags_with_separator",
        "separator": "; ",
        "at_least_one": True,
        "tags": [
            {
                "type": "tag",
                "begin": f"<f={name}>",
                "content": {"type": "json_schema", "json_schema": {"type": "integer"}},
                "end": "</f>",
            }
            for name in "ab"
        ],
    },
}


TAGS_OR_SCHEMA = {
    "type": "structural_tag",
    "format": {
        "type": "or",
        "elements": [
            SEPARATED_TAGS["format"],
            {"type": "json_schema", "json_schema": {"type": "array", "items": {"type": "integer"}}},
        ],
    },
}


def arguments_tag(*, required: list[str]) -> dict[str, Any]:
    """A list of calls with keyword arguments, or a text that begins otherwise."""
    properties = {"a": {"$ref": "#/$defs/n"}, "b": {"enum": ["x)", True]}, "c": {"const": None}}
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "$defs": {"n": {"enum": [1, 2]}},
    }
    content = {"type": "keyword_arguments", "json_schema": schema}
    tag = {"type": "tag", "begin": "f(", "content": content, "end": ")"}
    calls = {"type": "tags_with_separator", "tags": [tag], "separator": ", ", "begin": "[", "end": "]"}
    text = {"type": "regex", "pattern": "[^\\[/](.|\n)*"}
    elements = [{**calls, "at_least_one": True}, text]
    return {"type": "structural_tag", "format": {"type": "or", "elements": elements}}


NO_REQUIRED, B_REQUIRED = arguments_tag(required=[]), arguments_tag(required=["b"])
WITH_PREFACE = {
    "type": "structural_tag",
    "format": {
        "type": "or",
        "elements": [SEPARATED_TAGS["format"], {"type": "json_schema", "json_schema": {"enum": [1]}}],
        "preface": {
            "type": "tag",
            "begin": "<t>",
            "content": {"type": "regex", "pattern": "[a-z/]*"},
            "end": "<e>",
        },
    },
}
SUM = {"properties": {"s": {"const": 1}}, "required": ["s"], "additionalProperties": False, "type": "object"}
NAMED = {
    "type": "object",
    "properties": {"n": {"enum": ["f", "g"]}, "a": {"const": "x"}},
    "required": ["n"],
    "additionalProperties": False,
}
TAGS_LIKE_JSON = {
    "type": "structural_tag",
    "format": {
        "type": "or",
        "elements": [
            {
                **SEPARATED_TAGS["format"],
                "tags": [{**SEPARATED_TAGS["format"]["tags"][0], "begin": '{"n": "f", "a": '}],
            },
            {"type": "json_schema", "json_schema": {"anyOf": [SUM, NAMED]}},
        ],
    },
}
TAGS_OR_TAG = {
    "type": "structural_tag",
    "format": {
        "type": "or",
        "elements": [SEPARATED_TAGS["format"], {**SEPARATED_TAGS["format"]["tags"][0], "begin": "<g>"}],
    },
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("document", "text", "expected"),
    [
        (TAGS_OR_SCHEMA, "[1, 2]", True),
        (TAGS_OR_SCHEMA, "<f=a>1</f>", True),
        (TAGS_OR_SCHEMA, "<f=b>1</f>; <f=a>2</f>", True),
        (TAGS_OR_SCHEMA, "[1, 2]<f=a>1</f>", False),
        (TAGS_OR_SCHEMA, "<f=a>1</f>[1]", False),
        (TAGS_OR_SCHEMA, "", False),
        (TAGS_OR_SCHEMA, "text", False),
        (NO_REQUIRED, "[f()]", True),
        (NO_REQUIRED, "[f(a=1), f(b=true, c=null)]", True),
        (NO_REQUIRED, '[f(a=2, b="x)", c=null)]', True),
        (NO_REQUIRED, "[f(b=true, a=1)]", False),
        (NO_REQUIRED, "[f(a=1, a=1)]", False),
        (NO_REQUIRED, "[f(, a=1)]", False),
        (NO_REQUIRED, "[f(a=3)]", False),
        (NO_REQUIRED, "[]", False),
        (NO_REQUIRED, "[f(a=1)", False),
        (NO_REQUIRED, "f() or\n[f()]", True),
        (NO_REQUIRED, "[f()] or", False),
        (B_REQUIRED, "[f(b=true)]", True),
        (B_REQUIRED, "[f(b=true, a=1, c=null)]", True),
        (B_REQUIRED, "[f(b=true, c=null)]", True),
        (B_REQUIRED, "[f(a=1)]", False),
        (B_REQUIRED, "[f()]", False),
        (WITH_PREFACE, "<t>think/ing<e><f=a>1</f>", True),
        (WITH_PREFACE, "<t><e>1", True),
        (WITH_PREFACE, "1", True),
        (WITH_PREFACE, "<t>a1<e>1", False),
        (WITH_PREFACE, "<t>a<e>", False),
        (TAGS_LIKE_JSON, '{"n": "f", "a": 1</f>', True),
        (TAGS_LIKE_JSON, '{"s": 1}', True),
        (TAGS_LIKE_JSON, '{"n": "g"}', True),
        (TAGS_LIKE_JSON, '{"n":"f", "a":"x"}', True),
        (TAGS_LIKE_JSON, '{"n": "g", "a": 1</f>', False),
        (TAGS_OR_TAG, "<g>1</f>", True),
        (TAGS_OR_TAG, "<g>1</f>; <g>1</f>", False),
        (OLD_TAGS, "free text", True),
        (OLD_TAGS, "so: <f=a>{}</f> and <f=b>[1]</f>.", True),
        (OLD_TAGS, "<f=a>[1]</f>", False),
        (OLD_TAGS, "<f=c>", False),
        (OLD_TAGS, "<f=a>{}", False),
        (OLD_TAGS, "a < b", True),
        (new_tags(), "none", True),
        (new_tags(at_least_one=True), "<f=a>1</f> x", True),
        (new_tags(at_least_one=True), "none", False),
        (new_tags(at_least_one=True, stop_after_first=True), "<f=a>1</f>", True),
        (new_tags(at_least_one=True, stop_after_first=True), "<f=a>1</f> x", False),
        ({"type": "structural_tag", "format": new_tags()["format"]["tags"][0]}, "<f=a>1</f>", True),
        ({"type": "structural_tag", "format": new_tags()["format"]["tags"][0]}, "x<f=a>1</f>", False),
        (SEPARATED_TAGS, "<f=a>1</f>", True),
        (SEPARATED_TAGS, "<f=a>1</f>; <f=b>2</f>", True),
        (SEPARATED_TAGS, "<f=a>1</f><f=b>2</f>", False),
        (SEPARATED_TAGS, "<f=a>1</f>; ", False),
        (SEPARATED_TAGS, "x", False),
    ],
)
def test_a_trigger_begins_a_tag(name, document, text, expected):
    assert accepts(name, Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(document)), text) is expected


def test_a_tag_may_begin_with_a_special_token():
    document = {
        "structures": [{"begin": "<|user|>call:", "schema": {"const": 1}, "end": "<|end|>"}],
        "triggers": ["<|user|>"],
    }
    matcher = (
        backend("llguidance")
        .compile(Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(document)))
        .matcher()
    )
    assert 3 in allowed(matcher)  # <|user|>
    assert matcher.accept([*ids("text"), 3, *ids("call:1")]) == len(ids("text")) + 1 + len(ids("call:1"))
    assert allowed(matcher) == [0]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("constraint", [schema({"type": "string"}), regex('"[^x]*"')])
def test_a_special_token_is_no_text(name, constraint):
    matcher = backend(name).compile(constraint).matcher()
    matcher.accept(ids('"a'))
    special = [TOKENIZER.token_to_id(text) for text in ("<|user|>", "<|end|>")]
    assert not {EOS, *special} & set(allowed(matcher))


def test_xgrammar_refuses_tags_with_special_tokens():
    document = {"structures": [{"begin": "<|user|>a", "schema": {}, "end": ""}], "triggers": ["<|user|>"]}
    with pytest.raises(GrammarError, match=r"special token '<\|user\|>' is not supported by xgrammar"):
        backend("xgrammar").compile(Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(document)))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "not a JSON object"),
        ({"structures": [], "triggers": ["<"]}, "0 tags"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": ["<b"]}, "no trigger begins"),
        ({"structures": [{"begin": "<a", "end": ""}], "triggers": ["<a"]}, "has no schema"),
        ({"format": {"type": "sequence", "elements": []}}, "'sequence' is not supported"),
        ({"structures": [{"begin": "<a", "schema": {}, "end": ""}], "triggers": ["<", "<a"]}, "a part of"),
    ],
)
def test_a_document_of_tags_is_refused_by_name(document, words):
    with pytest.raises(GrammarError, match=words):
        backend("llguidance").compile(Constraint(ConstraintKind.STRUCTURAL_TAG, json.dumps(document)))


@pytest.mark.parametrize("name", BACKENDS)
def test_sampled_answers_are_in_the_language(name):
    constraint = regex("(cat|dog)s? [0-9]{2}")
    for seed in range(20):
        tokens = sampled(backend(name).compile(constraint).matcher(), seed)
        assert re.fullmatch("(cat|dog)s? [0-9]{2}", TOKENIZER.decode(tokens))


@pytest.mark.parametrize("name", BACKENDS)
def test_the_end_token_is_allowed_exactly_where_the_output_may_end(name):
    matcher = backend(name).compile(regex("ab?")).matcher()
    assert EOS not in allowed(matcher) and not matcher.is_accepting
    matcher.accept(ids("a"))
    assert EOS in allowed(matcher) and matcher.is_accepting and not matcher.is_terminated
    assert matcher.accept([EOS]) == 1
    assert matcher.is_terminated and matcher.is_accepting


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("end", [0, 4])
def test_each_of_several_end_tokens_ends(name, end):
    made = make_backend(name, Vocabulary(TOKENIZER_JSON, SIZE, (0, 4)))
    for text in ("ab", "a"):  # where nothing may follow, and where something may
        matcher = made.compile(regex("ab?")).matcher()
        assert matcher.accept(ids(text)) == len(ids(text))
        assert {0, 4} <= set(allowed(matcher))
        assert matcher.accept([end, end]) == 1
        assert matcher.is_terminated
        matcher.rollback(1)
        assert matcher.accept([4]) == 1


@pytest.mark.parametrize("name", BACKENDS)
def test_no_token_beyond_the_tokenizer_is_allowed(name):
    assert (
        max(allowed(backend(name).compile(regex("(?s:.*)" if name == "llguidance" else "[^a]*")).matcher()))
        < 2048
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_a_forbidden_token_leaves_the_state(name):
    matcher = backend(name).compile(regex("abc|abd")).matcher()
    [a], [b], [x] = ids("a"), ids("b"), ids("x")
    assert matcher.accept([a, x, b]) == 1
    assert matcher.accept([SIZE + 5]) == 0
    assert matcher.accept([b]) == 1
    assert set(allowed(matcher)) == {*ids("c"), *ids("d")}


@pytest.mark.parametrize("name", BACKENDS)
def test_rollback_restores_every_mask(name):
    text = '{"name": "Lee", "age": 33, "tags": ["x", "y"]}'
    matcher = (
        backend(name)
        .compile(schema({"type": "object", "properties": {"name": {"type": "string"}}}))
        .matcher()
    )
    masks = []
    tokens = ids(text)
    for token in tokens:
        masks.append(allowed(matcher))
        assert matcher.accept([token]) == 1
    matcher.accept([EOS])
    matcher.rollback(1)
    for count, mask in zip((1, 2, 1), (masks[-1], masks[-3], masks[-4]), strict=True):
        matcher.rollback(count)
        assert allowed(matcher) == mask
    with pytest.raises(MatcherError):
        matcher.rollback(1000)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_copy_goes_its_own_way(name):
    matcher = backend(name).compile(regex("ab|ac")).matcher()
    matcher.accept(ids("a"))
    other = matcher.copy()
    other.accept(ids("b"))
    assert matcher.accept(ids("c")) == 1 and matcher.is_accepting and other.is_accepting


@pytest.mark.parametrize("name", BACKENDS)
def test_masks_of_several_rows_are_those_of_each_alone(name):
    grammars = [backend(name).compile(regex(text)) for text in ("a+", "b+", "[0-9]")]
    matchers = [(grammar.matcher(), row) for grammar, row in zip(grammars, (4, 0, 2), strict=True)]
    masks = torch.full((5, backend(name).vocabulary.num_words), -1, dtype=torch.int32)
    assert backend(name).fill_masks(matchers, masks) == []
    for matcher, row in matchers:
        alone = torch.zeros_like(masks)
        matcher.fill_mask(alone, row)
        assert torch.equal(alone[row], masks[row])
    assert (masks[[1, 3]] == -1).all()
    with pytest.raises(IndexError):
        backend(name).fill_masks([(matchers[0][0], 5)], masks)
    with pytest.raises(ValueError, match="words"):
        backend(name).fill_masks(matchers, masks[:, :-1])


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (schema({"type": "any"}), "any"),
        (schema({"not": {"type": "string"}}), "not"),
        (schema({"uniqueItems": True}), "uniqueItems"),
        (schema({"x-guidance": {"lenient": True}, "not": {}}), "not"),
        (schema({"properties": {"a": {"x-guidance": {"lenient": True}, "not": {}}}}), "not"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "{"), "not JSON"),
        (Constraint(ConstraintKind.JSON_SCHEMA, "false"), "no output"),
        (regex("(?=a)b"), "look-around"),
        (regex(r"(a)\1"), "backreferences"),
        (regex("("), "unclosed group"),
        (regex("a\0"), "NUL"),
        (Constraint(ConstraintKind.CHOICE), "no texts"),
        (Constraint(ConstraintKind.GRAMMAR, "start: other"), "other"),
        (Constraint(ConstraintKind.GRAMMAR, "start: start"), "no output"),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no output"),
        (Constraint(ConstraintKind.GRAMMAR, 'root ::= "a'), "grammar"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(constraint, words):
    with pytest.raises(GrammarError, match=words):
        backend("llguidance").compile(constraint)


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (regex("(?=a)b"), "Lookahead"),
        (regex(r"(a)\1"), "Backreference"),
        (regex(r"\bword"), "Word boundary"),
        (regex("[[:alpha:]]"), "classes by name"),
        (regex("[a-z]{0,9}(a{1000}){10}"), "repeats 10009 parts"),
        (schema({"type": "string", "maxLength": 100_000}), "counts to 100000"),
        (schema({"properties": {"not": {"uniqueItems": True}}}), "uniqueItems is not enforced"),
        (schema({"anyOf": [{"oneOf": [{"minimum": 1}, {"maximum": 2}]}]}), "oneOf is not enforced"),
        (schema({"type": "array"}, whitespace=Whitespace(pattern=" ?")), "whitespace_pattern"),
        (schema({"type": "integer", "maximum": 10**400}), "xgrammar cannot compile the json_schema"),
        (Constraint(ConstraintKind.GRAMMAR, 'root ::= "a'), "Expect"),
    ],
)
def test_what_xgrammar_cannot_enforce_is_refused_by_name(constraint, words):
    with pytest.raises(GrammarError, match=words):
        backend("xgrammar").compile(constraint)


@pytest.mark.parametrize(
    "constraint",
    [
        regex("(a{1000}){1000}"),
        regex("((a?[b{9}]){0,2000}c){20,}|((a|b{30}){30}){30}"),
        schema({"pattern": "((a{20}){1,50}){100}"}),
        schema({"properties": {"const": {"pattern": "(a{200}){200}"}}}),
        schema({"$ref": "#/examples/0", "examples": [{"pattern": "(a{200}){200}"}]}),
        schema({"type": "integer", "multipleOf": 1234567}),
        schema({"properties": {str(index): {} for index in range(10_000)}}),
        schema({"allOf": [{"multipleOf": 997}, {"multipleOf": 9.91}]}),
        schema({"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(3)]} for i in range(12)]}),
        schema({"const": "x" * (2 << 20)}),
        schema({"const": ["x" * 20_000]}),
        schema({"required": ["x" * 20_000]}),
        schema({}, whitespace=Whitespace(pattern="(a{1000}){1000}")),
        schema({"properties": {"x" * 20_000: {}}}),
        Constraint(ConstraintKind.CHOICE, choices=("x" * 20_000,)),
        Constraint(ConstraintKind.GRAMMAR, "start: A\nA: " + " & ".join(f"/a*b{i}/" for i in range(6))),
        Constraint(ConstraintKind.JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000),
        regex("(" * 5000 + ")" * 5000),
    ],
)
def test_a_hostile_constraint_ends_by_a_limit(constraint):
    with pytest.raises(GrammarTooComplex):
        backend("llguidance").compile(constraint)


def test_symbols_of_a_grammar_have_a_limit():
    properties = {f"p{index}": {} for index in range(100)}
    objects = [{"properties": properties, "required": [f"p{index}"]} for index in range(180)]
    with pytest.raises(GrammarTooComplex, match=r"^json_schema needs more than 65524 symbols of a grammar$"):
        backend("llguidance").compile(schema({"prefixItems": objects}))


@pytest.mark.parametrize(
    ("name", "document", "message"),
    [
        ("xgrammar", {"type": "integer", "minimum": -(10**300)}, "Integer exceeds minimum limit"),
        (
            "llguidance",
            {"type": "integer", "multipleOf": 10**30},
            f"Value for 'multipleOf' has too many digits: {10**30}",
        ),
    ],
)
def test_an_error_has_neither_a_backend_s_sources_nor_the_text_made_for_it(name, document, message):
    with pytest.raises(GrammarError) as error:
        backend(name).compile(schema(document))
    assert str(error.value) == message


def test_a_panic_of_the_compiler_reaches_clients_without_its_backtrace():
    message = "panic: called `Option::unwrap()`\n on a `None` value\n<backtrace>\n 0: <unknown>\n</backtrace>"
    error = llguidance_text.grammar_error(regex("a"), message)
    assert isinstance(error, GrammarTooComplex)
    assert str(error) == "regex cannot be compiled: called `Option::unwrap()` on a `None` value"
    assert "backtrace" not in llguidance_text.short_message(message)


def ambiguous(index: int) -> dict[str, str]:
    return {"pattern": f"^((a|b)*a(a|b){{{index}}}|c)$"}


@pytest.mark.parametrize(
    "document",
    [
        {"allOf": [ambiguous(index) for index in range(20, 26)]},
        {"allOf": [{"allOf": [ambiguous(20), ambiguous(21)]}, {"$ref": "#/$defs/a"}, ambiguous(24)],
         "$defs": {"a": ambiguous(22) | {"$ref": "#/$defs/b"}, "b": ambiguous(23)}},
        {"prefixItems": [ambiguous(20) | {"$ref": "#/prefixItems/1"}, ambiguous(21) | {"$ref": "#x"},
                         ambiguous(22), ambiguous(23) | {"$anchor": "x"}]},
        {"items": {"allOf": [{"properties": {"a": ambiguous(index)}} for index in range(20, 26)]}},
        {"allOf": [{"properties": {"a": ambiguous(20)}}, {"properties": {"a": ambiguous(21)}},
                   {"additionalProperties": ambiguous(22)}, {"patternProperties": {"^a": ambiguous(23)}}]},
        {"allOf": [{"items": ambiguous(20)}, {"prefixItems": [ambiguous(21)]},
                   {"items": {"anyOf": [{}, {"allOf": [ambiguous(22), ambiguous(23)]}]}}]},
    ],
)  # fmt: skip
def test_patterns_for_the_same_text_are_few(document):
    with pytest.raises(GrammarTooComplex, match=r"allOf: [4-6] patterns for the same text, 3 are allowed"):
        backend("llguidance").compile(schema(document))


def test_patterns_of_different_texts_are_not_counted_together():
    properties = [{"properties": {f"a{index}": ambiguous(index)}} for index in range(20)]
    either = {"anyOf": [ambiguous(index) for index in range(20)]}
    recursive = {"allOf": [ambiguous(1), {"items": {"$ref": "#/$defs/a"}}]}
    assert backend("llguidance").compile(schema({"allOf": properties}))
    assert backend("llguidance").compile(schema({"allOf": [ambiguous(20), either]}))
    assert backend("llguidance").compile(schema({"$ref": "#/$defs/a", "$defs": {"a": recursive}}))


def test_a_matcher_out_of_fuel_fails_alone(monkeypatch):
    made = backend("llguidance")
    healthy = made.compile(regex("a+")).matcher()
    monkeypatch.setattr(llguidance_text, "STEP_LEXER_FUEL", 10)
    starved = made.compile(regex("QQQ(a|b|ab|ba|[c-z]{3,9}){1,20}")).matcher()
    assert starved.accept(ids("QQQ")) == len(ids("QQQ"))
    masks = torch.zeros((2, made.vocabulary.num_words), dtype=torch.int32)
    assert made.fill_masks([(starved, 0), (healthy, 1)], masks) == [0]
    for call in (
        lambda: starved.fill_mask(masks, 0),
        lambda: starved.accept([1]),
    ):
        with pytest.raises(MatcherError):
            call()
    assert healthy.accept(ids("a")) == 1


def byte_vocabulary(alphabet: str, longest: int) -> tuple[Vocabulary, list[str]]:
    """All texts of a few letters of an alphabet as tokens, and an end token."""
    texts = ["".join(text) for size in range(1, longest + 1) for text in product(alphabet, repeat=size)]
    spelled = [text.replace(" ", "\u0120") for text in texts]
    vocab = {"<end>": 0} | {text: index + 1 for index, text in enumerate(spelled)}
    merges = [(text[:-1], text[-1]) for text in spelled if len(text) > 1]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return Vocabulary(tokenizer.to_str(), len(vocab), (0,)), ["", *texts]


@cache
def small_backend(name: str, alphabet: str, longest: int) -> tuple[GrammarBackend, list[str]]:
    vocabulary, texts = byte_vocabulary(alphabet, longest)
    return make_backend(name, vocabulary), texts


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "pattern", ["a(b|1)*", "(ab|ba){1,2}1?", "[ab]{0,3}", "a?b?1?a", "(a|ab)(1|b1)", "1+|b"]
)
def test_exactly_the_viable_tokens_are_allowed(name, pattern):
    """By brute force: those that lead to some text of at most 9 letters in the language."""
    made, texts = small_backend(name, "ab1", 3)
    words = [""]
    language = {word for word in words if re.fullmatch(pattern, word)}
    for _ in range(9):
        words = [word + letter for word in words for letter in "ab1"]
        language |= {word for word in words if re.fullmatch(pattern, word)}
    prefixes = {word[:end] for word in language for end in range(len(word) + 1)}
    grammar = made.compile(regex(pattern))
    reached = {"": grammar.matcher()}
    while reached:
        prefix, matcher = reached.popitem()
        mask = set(allowed(matcher, made.vocabulary.size))
        expected = {index for index, text in enumerate(texts) if index and prefix + text in prefixes}
        if prefix in language:
            expected.add(0)
        assert mask == expected, (pattern, prefix)
        for index in expected - {0}:
            if len(prefix + texts[index]) <= 5:
                following = matcher.copy()
                assert following.accept([index]) == 1
                reached[prefix + texts[index]] = following


A_OR_B = {"enum": ["a", "b"]}
FINITE: list[tuple[object, list[object]]] = [
    (A_OR_B, ["a", "b"]),
    ({"enum": [1, 11, "1", None, [], {}]}, [1, 11, "1", None, [], {}]),
    ({"type": ["boolean", "null"]}, [True, False, None]),
    ({"type": "integer", "minimum": 0, "maximum": 2}, [0, 1, 2]),
    ({"type": "integer", "minimum": -12, "maximum": -10}, [-12, -11, -10]),
    ({"type": "array", "items": A_OR_B, "maxItems": 1}, [[], ["a"], ["b"]]),
    (
        {"type": "array", "prefixItems": [A_OR_B, {"const": 1}], "items": False},
        [[], ["a"], ["b"], ["a", 1], ["b", 1]],
    ),
    ({"anyOf": [{"const": "ab"}, A_OR_B, {"type": "null"}]}, ["ab", "a", "b", None]),
    (
        {
            "type": "object",
            "properties": {"a": A_OR_B, "ab": {"const": 1}, "b": {"type": "null"}},
            "required": ["ab"],
            "additionalProperties": False,
        },
        [first | {"ab": 1} | last for first in ({}, {"a": "a"}, {"a": "b"}) for last in ({}, {"b": None})],
    ),
    (
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "items": {"const": [1]}, "maxItems": 2}}},
        [[], [[1]], [[1], [1]]],
    ),
    ({"type": "string", "maxLength": 1, "pattern": "^[ab]*$"}, ["", "a", "b"]),
    ({"type": "string", "pattern": "^a{1,2}(b|1)?$"}, ["a", "aa", "ab", "aab", "a1", "aa1"]),
    ({"allOf": [{"enum": ["a", "b", 1]}, {"type": "string"}]}, ["a", "b"]),
]  # fmt: skip


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("document", "instances"), FINITE)
def test_a_finite_schema_allows_its_instances_token_by_token(name, document, instances):
    """By brute force, over all tokens of one or two characters, in single spaces."""
    if name == "xgrammar" and {"pattern", "allOf"} & set(document):  # frontends refuse them for it
        return
    made, texts = small_backend(name, '{}[]":, ab1-02eflnrstu', 2)
    grammar = made.compile(schema(document, whitespace=Whitespace(Spacing.SINGLE)))
    language = {json.dumps(value) for value in instances}
    prefixes = {text[:end] for text in language for end in range(len(text) + 1)}
    reached = {"": grammar.matcher()}
    done = set()
    while reached:
        prefix, matcher = reached.popitem()
        done.add(prefix)
        mask = set(allowed(matcher, made.vocabulary.size))
        viable = {index for index, text in enumerate(texts) if index and prefix + text in prefixes}
        expected = viable | {0} if prefix in language else viable
        if mask != expected:
            # Text that must follow may be left to its usual tokens.
            longest = max((texts[index] for index in viable), key=len)
            assert name == "llguidance" and mask and mask < expected, (prefix, mask ^ expected)
            assert all(longest.startswith(texts[index]) for index in viable) and prefix not in language
        for index in mask - {0}:
            if prefix + texts[index] not in done:
                following = matcher.copy()
                assert following.accept([index]) == 1
                reached[prefix + texts[index]] = following
    assert language <= done


def sentencepiece_vocabulary() -> tuple[Vocabulary, list[bytes]]:
    """Words begin with a mark, what the vocabulary lacks is written in byte tokens; as Llama 2 and Gemma."""
    words = ["\u2581", "a", "b", "\u2581a", "ab", "\u2581ab", "é", "日"]
    texts = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={text: index for index, text in enumerate(texts)},
            merges=[("\u2581", "a"), ("a", "b"), ("\u2581a", "b")],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    spelled = [b"", b"", *(bytes([byte]) for byte in range(256))]
    spelled += [word.replace("\u2581", " ").encode() for word in words]
    return Vocabulary(tokenizer.to_str(), len(texts) + 7, (1,)), spelled


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("pattern", ["(a|b| ab|é|日本){1,6}", "[a-bé日]+", "a( b)*"])
def test_marks_and_byte_tokens_of_sentencepiece_are_what_they_stand_for(name, pattern):
    vocabulary, spelled = sentencepiece_vocabulary()
    grammar = make_backend(name, vocabulary).compile(regex(pattern))
    noise = random.Random(7)
    for _ in range(15):
        matcher, text = grammar.matcher(), b""
        for _ in range(60):
            token = noise.choice(allowed(matcher, vocabulary.size))
            assert matcher.accept([token]) == 1
            if token == 1:
                assert re.fullmatch(pattern, text.decode())
                break
            text += spelled[token]
