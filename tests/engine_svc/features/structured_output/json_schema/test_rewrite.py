"""A rewritten schema has the instances of the original: by an independent validator over random ones."""

from __future__ import annotations

import json
import random
from itertools import product
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine_svc.features.structured_output.json_schema.document import InvalidSchema, SchemaTooLarge
from engine_svc.features.structured_output.json_schema.patterns import texts_of, translated
from engine_svc.features.structured_output.json_schema.rewrite import rewrite

NAMES = ("a", "b", "c")
VALUES: tuple[Any, ...] = (None, True, False, 0, 1, 2, 3, 2.5, "", "a", "ab", "b", [], {}, [1], {"a": 1})
PLAIN = {
    "type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "minLength", "maxLength", "pattern", "format", "properties", "required", "additionalProperties",
    "patternProperties", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems",
    "contains", "allOf", "anyOf", "$ref", "$defs",
}  # fmt: skip


class Generator:
    """Random schemas of every keyword, and random instances over the same few values."""

    def __init__(self, seed: int) -> None:
        self.noise = random.Random(seed)

    def schema(self, depth: int = 3) -> Any:
        if depth == 0 or self.noise.random() < 0.08:
            return self.noise.choice([True, {}, {"type": "string"}, {"const": 1}, {"type": "integer"}, False])
        found: dict[str, Any] = {}
        for _ in range(self.noise.randint(1, 3)):
            found |= self.keyword(depth - 1)
        return found

    def keyword(self, depth: int) -> dict[str, Any]:
        noise = self.noise
        kinds = ["null", "boolean", "object", "array", "string", "number", "integer"]
        name = noise.choice(NAMES)
        makers: list[Any] = [
            lambda: {"type": noise.choice(kinds)},
            lambda: {"type": noise.sample(kinds, 2)},
            lambda: {"type": "object"},
            lambda: {"enum": noise.sample(VALUES, 3)},
            lambda: {"const": noise.choice(VALUES)},
            lambda: {
                noise.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]): noise.randint(
                    0, 3
                )
            },
            lambda: {noise.choice(["minLength", "maxLength", "minItems", "maxItems"]): noise.randint(0, 2)},
            lambda: {noise.choice(["minProperties", "maxProperties"]): noise.randint(0, 2)},
            lambda: {"pattern": noise.choice(["^a", "b$", "a|b", "^[ab]*$"])},
            lambda: {"properties": {key: self.schema(depth) for key in noise.sample(NAMES, 2)}},
            lambda: {"required": noise.sample(NAMES, noise.randint(1, 2))},
            lambda: {"additionalProperties": noise.choice([False, self.schema(depth)])},
            lambda: {"patternProperties": {noise.choice(["^a", "b", "^[bc]$"]): self.schema(depth)}},
            lambda: {"patternProperties": {"a": self.schema(depth), "^.?b?$": self.schema(depth)}},
            lambda: {
                "propertyNames": noise.choice(
                    [
                        {"pattern": "^[ab]"},
                        {"enum": ["a", "c"]},
                        {"maxLength": 0},
                        False,
                        True,
                        {"not": {"const": "a"}},
                        {"not": {"enum": ["b", "x"]}},
                        {"not": {"pattern": "^b"}},
                    ]
                )
            },
            lambda: {"dependentRequired": {name: [noise.choice(NAMES)]}},
            lambda: {"dependentSchemas": {name: self.schema(depth)}},
            lambda: {"items": self.schema(depth)},
            lambda: {"prefixItems": [self.schema(depth) for _ in range(2)]},
            lambda: {"contains": self.schema(depth)},
            lambda: {"uniqueItems": True, "maxItems": 1},
            lambda: {"uniqueItems": True, "items": {"enum": noise.sample(VALUES, 3)}},
            lambda: {"unevaluatedProperties": False},
            lambda: {"unevaluatedItems": False},
            lambda: {"allOf": [self.schema(depth) for _ in range(2)]},
            lambda: {"anyOf": [self.schema(depth) for _ in range(2)]},
            lambda: {"oneOf": [self.schema(depth) for _ in range(noise.randint(1, 3))]},
            lambda: {"not": self.schema(depth)},
            lambda: {"if": self.schema(depth), "then": self.schema(depth), "else": self.schema(depth)},
            lambda: {"if": self.schema(depth), noise.choice(["then", "else"]): self.schema(depth)},
            lambda: {"$ref": "#/$defs/x"},
        ]
        made: dict[str, Any] = noise.choice(makers)()
        return made

    def instance(self, depth: int = 3) -> Any:
        noise = self.noise
        kind = noise.random()
        if depth == 0 or kind < 0.45:
            return noise.choice(VALUES)
        if kind < 0.6:
            return [self.instance(depth - 1) for _ in range(noise.randint(0, 3))]
        return {name: self.instance(depth - 1) for name in noise.sample(NAMES, noise.randint(0, 3))}


def words(schema: Any) -> set[str]:
    """The keywords of a schema and of those in it."""
    if not isinstance(schema, dict):
        return set()
    found = set(schema)
    for name, value in schema.items():
        if name in ("properties", "patternProperties", "$defs"):
            for entry in value.values():
                found |= words(entry)
        elif name in ("allOf", "anyOf", "prefixItems"):
            for entry in value:
                found |= words(entry)
        elif name in ("items", "contains", "additionalProperties"):
            found |= words(value)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_random_schemas_keep_their_instances(seed):
    generator = Generator(seed)
    num_rewritten = num_valid = num_invalid = 0
    refusals = set()
    for _ in range(400):
        schema = generator.schema()
        if not isinstance(schema, dict):
            continue
        schema["$defs"] = {"x": generator.schema(1)}
        try:
            rewritten = rewrite(json.dumps(schema))
        except InvalidSchema as error:
            refusals.add(str(error))
            continue
        except SchemaTooLarge:  # a negation of itself never ends
            assert "$ref" in json.dumps(schema["$defs"])
            continue
        assert words(rewritten.schema) <= PLAIN
        if rewritten.unenforced:
            continue
        num_rewritten += 1
        expected, found = Draft202012Validator(schema), Draft202012Validator(rewritten.schema)
        for _ in range(25):
            instance = generator.instance()
            try:
                is_valid = expected.is_valid(instance)
            except RecursionError:  # it joins itself where rewriting found nothing to join
                break
            num_valid += is_valid
            num_invalid += not is_valid
            assert found.is_valid(instance) == is_valid, (schema, rewritten.schema, instance)
    assert refusals <= {
        "json_schema is false, which no output satisfies",
        "json_schema is satisfied by no finite value",
        "$ref leads to itself",
    }
    assert num_rewritten > 200 and num_valid > 500 and num_invalid > 500


UNENFORCED = [
    ({"uniqueItems": True}, "uniqueItems", ""),
    (
        {"properties": {"a/b": {"contains": {}, "minContains": 2, "items": False}}},
        "contains",
        "/properties/a~1b",
    ),
    ({"not": {"pattern": r"a\b"}}, "not", ""),
    ({"not": {"pattern": "^[ab]*a[ab]{12}$"}}, "not", ""),
    ({"oneOf": [{"format": "email"}, {"format": "uri"}]}, "oneOf", ""),
    ({"if": {"format": "date"}, "then": False}, "if", ""),
    ({"items": {"minProperties": 2}}, "minProperties", "/items"),
    ({"properties": {"a": {}}, "maxProperties": 3}, "maxProperties", ""),
    ({"propertyNames": {"not": {"format": "email"}}}, "propertyNames", ""),
    ({"not": {"propertyNames": {"pattern": "a"}}}, "not", ""),
    ({"not": {"patternProperties": {"a": {"const": 1}}}}, "not", ""),
    ({"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluatedProperties", ""),
    ({"allOf": [{"prefixItems": [{}]}], "unevaluatedItems": False}, "unevaluatedItems", ""),
    ({"anyOf": [{"pattern": "(?<=a)b"}]}, "pattern", "/anyOf/0"),
    ({"pattern": r"(a)\1"}, "pattern", ""),
    ({"pattern": r"\bword"}, "pattern", ""),
    ({"patternProperties": {"(?<!a)b": {}}, "additionalProperties": False}, "patternProperties", ""),
    ({"const": "\u0001"}, "const", ""),
    ({"$recursiveRef": "#/other"}, "$recursiveRef", ""),
    ({"$defs": {"x": {"uniqueItems": True}}, "items": {"$ref": "#/$defs/x"}}, "uniqueItems", "/$defs/x"),
]


@pytest.mark.parametrize(("schema", "keyword", "place"), UNENFORCED)
def test_what_has_no_equal_is_reported_by_keyword_and_place(schema, keyword, place):
    [found] = rewrite(json.dumps(schema)).unenforced
    assert found.keyword == keyword
    assert found.pointer == place or place.startswith("/$defs")
    assert keyword in str(found) and found.reason


# By draft 2020-12 the reference leads to a text, by draft 7, where $id says nothing beside $ref, to a number.
ID_BESIDE_REF = {
    "$id": "http://x/base/",
    "$defs": {
        "text": {"$id": "http://x/foo.json", "type": "string"},
        "number": {"$id": "foo.json", "type": "number"},
    },
    "items": {"$id": "http://x/", "$ref": "foo.json"},
}


@pytest.mark.parametrize(("draft", "item"), [("draft-07/schema#", 1), ("draft/2020-12/schema", "a")])
def test_a_draft_says_whether_an_id_counts_beside_a_reference(draft, item):
    rewritten = rewrite(json.dumps(ID_BESIDE_REF | {"$schema": f"http://json-schema.org/{draft}"}))
    validator = Draft202012Validator(rewritten.schema)
    assert [validator.is_valid([value]) for value in (1, "a")] == [item == 1, item == "a"]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "not JSON"),
        ("3", "neither an object"),
        ("false", "no output"),
        ('{"items": 3}', "items is 3, not a schema"),
        ('{"allOf": {}}', "allOf is {}, not a list of schemas"),
        ('{"properties": {"a": {"minLength": null}}}', "minLength .* whole .*, at #/properties/a$"),
        ('{"oneOf": [{"required": [1]}, true]}', "required is .*, not a list of texts, at #/oneOf/0$"),
        ('{"dependentRequired": {"a": 1}}', "not an object of lists of texts"),
        ('{"multipleOf": true}', "not a number above 0"),
        (r'{"const": "\ud800"}', "surrogates"),
        ('{"type": "any"}', 'type is "any", not one of array, .* or a list of them, at #$'),
        ('{"properties": {"a": {"items": {"type": ["text"]}}}}', "not one of .*, at #/properties/a/items$"),
        ('{"$defs": {"a/b": {"type": 1}}, "$ref": "#/$defs/a~1b"}', r"type is 1, .*, at #/\$defs/a~1b$"),
        ('{"$ref": "#/nowhere"}', "not in the document"),
        ('{"$ref": "https://example.com/x"}', "not in the document"),
        ('{"$ref": "#"}', "leads to itself"),
        ('{"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}', "leads to itself"),
        ('{"minimum": NaN}', "NaN"),
        (
            '{"$recursiveAnchor": true, "items": {"$id": "urn:x", "$recursiveAnchor": true, '
            '"items": {"$recursiveRef": "#"}}}',
            "several targets",
        ),
        (json.dumps(ID_BESIDE_REF), "\\$id beside \\$ref has no certain meaning"),
        ('{"dependencies": {"a": {}}, "dependentSchemas": "a"}', 'dependentSchemas is "a", not an object'),
        ('{"dependencies": {"a": ["b"]}, "dependentRequired": 1}', "dependentRequired is 1, not an object"),
    ],
)
def test_what_is_no_schema_is_refused(schema, words):
    with pytest.raises(InvalidSchema, match=words):
        rewrite(schema)


def joins(num_levels: int, width: int, last: Any) -> dict[str, Any]:
    """Definitions each of which joins the next one so many times."""
    return {
        f"d{level}": {"allOf": [{"$ref": f"#/$defs/d{level + 1}"}] * width} for level in range(num_levels)
    } | {f"d{num_levels}": last}


@pytest.mark.parametrize(
    "schema",
    [
        '{"items":' * 5000 + "{}" + "}" * 5000,
        json.dumps({"enum": list(range(60_000))}),
        # All pairs of branches are compared, each of many parts.
        json.dumps(
            {
                "oneOf": [
                    {"required": [str(i)], "properties": {f"{j}": {} for j in range(99)}} for i in range(64)
                ]
            }
        ),
        json.dumps({"$ref": "#/$defs/d0", "$defs": joins(7, 10, {}), "unevaluatedProperties": False}),
        json.dumps({"propertyNames": {"$ref": "#/$defs/d0"}, "$defs": joins(4, 60, {"maxLength": 3})}),
        # Each branch excludes all others.
        json.dumps({"oneOf": [{"required": [f"{i}{j}" for j in range(9)]} for i in range(64)]}),
    ],
)
def test_a_schema_beyond_a_limit_is_refused(schema):
    with pytest.raises(SchemaTooLarge):
        rewrite(schema)


def test_a_recursive_schema_stays_recursive():
    schema = {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "id": {"type": "integer"}},
        "required": ["id"],
    }
    rewritten = rewrite(json.dumps(schema))
    assert not rewritten.unenforced
    validator = Draft202012Validator(rewritten.schema)
    assert validator.is_valid({"id": 1, "next": {"id": 2}})
    assert not validator.is_valid({"id": 1, "next": {"id": "2"}})


def test_schemas_that_contain_each_other_are_joined_with_siblings():
    schema = {
        "$defs": {
            "a": {"properties": {"b": {"$ref": "#/$defs/b", "required": ["x"]}}},
            "b": {"properties": {"a": {"$ref": "#/$defs/a", "type": "object"}}},
        },
        "$ref": "#/$defs/a",
    }
    rewritten = rewrite(json.dumps(schema))
    validator = Draft202012Validator(rewritten.schema)
    for instance, is_valid in (
        ({"b": {"x": 1, "a": {"b": {"x": 1}}}}, True),
        ({"b": {"x": 1, "a": {"b": {}}}}, False),
        ({"b": {"x": 1, "a": 1}}, False),
    ):
        assert validator.is_valid(instance) is is_valid
    text = json.dumps(rewritten.schema)
    assert text.count('"$ref"') == text.count('{"$ref"')  # each stands alone


KINDS = {
    "oneOf": [
        {"properties": {"kind": {"const": "a"}, "x": {"pattern": "a"}}},
        {"properties": {"kind": {"const": "b"}}},
    ]
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        # Values of a property are those of additional ones, or of a pattern, in another branch.
        *(
            (
                {
                    "oneOf": [
                        {"type": "object", "required": ["t"], "properties": {"t": {"const": "x"}}},
                        {"type": "object", "minProperties": 1} | others,
                    ]
                },
                {"t": "x"},
                {"t": 1},
            )
            for others in (
                {"additionalProperties": {"type": "boolean"}},
                {"patternProperties": {"^t": {"type": "boolean"}, "x": {}}},
            )
        ),
        # What stands beside says that the branches cannot both be satisfied.
        ({"allOf": [{"type": "object", "required": ["kind"]}, KINDS]}, {"kind": "a", "x": "a"}, {"x": "b"}),
        ({"type": "object", "required": ["kind"], "allOf": [KINDS]}, {"kind": "b", "x": "b"}, {}),
        (
            {
                "properties": {
                    "a": {
                        "oneOf": [
                            {"properties": {"x": {"type": "string"}}},
                            {"properties": {"y": {"type": "integer"}}},
                        ],
                        "additionalProperties": False,
                    }
                }
            },
            {"b": 1},
            {"a": {}},
        ),
    ],
)
def test_branches_are_distinguished_by_what_stands_beside(schema, valid, invalid):
    rewritten = rewrite(json.dumps(schema))
    assert not rewritten.unenforced
    validator = Draft202012Validator(rewritten.schema)
    assert validator.is_valid(valid) and not validator.is_valid(invalid)


CASES: list[dict[str, Any]] = [
    {"if": {"properties": {"k": {"const": "a"}}}, "then": {"required": ["x"]}},
    {
        "if": {"properties": {"k": {"enum": ["b", 1]}}},
        "then": {"maxProperties": 1},
        "else": {"properties": {"y": False}},
    },
    {"if": {"properties": {"k": {"const": "c"}}}, "then": False, "else": {"maxProperties": 2}},
]
FORMS: list[dict[str, Any]] = [
    {},
    {"required": ["k"]},
    {"type": "object"},
    {"type": "object", "required": ["k"]},
]


@pytest.mark.parametrize("form", FORMS, ids=json.dumps)
def test_conditions_on_one_property_become_one_choice(form):
    schema = {"allOf": [case | {"if": case["if"] | form} for case in CASES]}
    written = rewrite(json.dumps(schema)).schema
    assert json.dumps(written).count('"pattern"') == 1  # of the other texts
    expected, found = Draft202012Validator(schema), Draft202012Validator(written)
    for kind, x, y in product(["a", "b", 1, "c", "d", 2, None, ...], [0, ...], [0, ...]):
        instance = {name: value for name, value in zip("kxy", (kind, x, y), strict=True) if value is not ...}
        assert found.is_valid(instance) == expected.is_valid(instance), instance
    for other in (0, "a", [], None):
        assert found.is_valid(other) == expected.is_valid(other)


def test_many_patterns_of_a_text_become_one():
    beginnings = ["ab", "ba", "bb", "ca", "cb"]
    schema = {"type": "string", "oneOf": [{"pattern": f"^{start}"} for start in beginnings]}
    written = rewrite(json.dumps(schema)).schema
    assert all("allOf" not in branch or len(branch["allOf"]) <= 2 for branch in written["anyOf"])
    never = {"allOf": [{"type": "string"}, {"pattern": "^a"}, {"pattern": "b$"}, {"pattern": "^.$"}]}
    with pytest.raises(InvalidSchema, match="no output satisfies"):
        rewrite(json.dumps(never))


def test_a_pattern_that_takes_exponential_time_is_not_searched():
    schema = {"oneOf": [{"pattern": "^(a+)+$"}, {"const": "a" * 100 + "b"}]}
    assert not rewrite(json.dumps(schema)).unenforced


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("^$", [""]),
        ("^(en|d[ef]|)$", ["en", "de", "df", ""]),
        ("^a?b{1,2}$", ["b", "bb", "ab", "abb"]),
        (r"^\.[0-2]\{$", [".0{", ".1{", ".2{"]),
        (r"^[\]\u0061-c]$", ["]", "a", "b", "c"]),
        *((pattern, []) for pattern in ("a", "^a", "^a|b$", "^a*$", "^.$", "^[^a]$", r"^\s\s$", "^(^a)$")),
    ],
)
def test_a_pattern_with_few_texts_is_enumerated(pattern, texts):
    assert texts_of(translated(pattern), 16) == texts


def test_spellings_of_earlier_drafts():
    schema = {
        "definitions": {"x": {"minimum": 3, "exclusiveMinimum": True}},
        "properties": {
            "a": {"items": [{"$ref": "#/definitions/x"}], "additionalItems": False},
            "b": {"dependencies": {"c": ["d"], "e": {"required": ["f"]}}},
        },
    }
    rewritten = rewrite(json.dumps(schema))
    assert not rewritten.unenforced
    validator = Draft202012Validator(rewritten.schema)
    for instance, is_valid in (
        ({"a": [4]}, True),
        ({"a": [3]}, False),
        ({"a": [4, 4]}, False),
        ({"b": {"c": 1}}, False),
        ({"b": {"e": 1, "f": 1}}, True),
    ):
        assert validator.is_valid(instance) is is_valid
