"""Values under schemas as an independent validator judges them, and schemas of which few values are left."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from engine_svc.features.structured_output.json_schema.document import InvalidSchema, SchemaDocument
from engine_svc.features.structured_output.json_schema.instances import satisfies, values_left
from engine_svc.features.structured_output.json_schema.logic import Prover
from engine_svc.features.structured_output.json_schema.numbers import exact
from engine_svc.features.structured_output.json_schema.rewrite import rewrite
from tests.engine_svc.features.structured_output.json_schema.test_rewrite import Generator
from triptych_kit.exact_json import dumps


def test_random_values_are_judged_as_by_a_validator():
    generator, num_known = Generator(5), {True: 0, False: 0, None: 0}
    for _ in range(400):
        schema = generator.schema()
        if not isinstance(schema, dict):
            continue
        schema["$defs"] = {"x": {"enum": ["a", 1, [1]]}}
        validator = Draft202012Validator(schema)
        prover = Prover(SchemaDocument(json.dumps(schema)))
        for _ in range(10):
            instance = generator.instance()
            exact_one = json.loads(json.dumps(instance), parse_float=exact)
            found = satisfies(prover, exact_one, prover.document.root)
            num_known[found] += 1
            assert found is None or found == validator.is_valid(instance), (schema, instance)
    assert num_known[True] > 400 and num_known[False] > 400 and num_known[None] < 800


@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"allOf": [{"enum": [{"a": 1}, {"b": 2}]}, {"not": {"patternProperties": {"b": {}}}}]}, []),
        ({"enum": [[1], [1, 1], 2, "b"], "uniqueItems": True, "not": {"const": 2}}, [[1], "b"]),
        ({"enum": [1.5, 2, 3], "not": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}, [2, 3, 1.5]),
        ({"oneOf": [{"enum": [[1], [2, 4]]}, {"enum": [[2, 4], []]}], "minItems": 1}, [[1]]),
        ({"enum": [9, 10, 12], "not": {"multipleOf": 2.5}, "if": {"maximum": 9}, "then": False}, [12]),
        ({"enum": [{"a": 1}, {"b": 1}], "not": {"patternProperties": {"a": {"const": 2}}}}, [{"a": 1}]),
    ],
)  # fmt: skip
def test_a_schema_with_listed_values_is_written_as_those_that_satisfy_it(schema, values):
    if not values:
        with pytest.raises(InvalidSchema):
            rewrite(json.dumps(schema))
    else:
        rewritten = rewrite(json.dumps(schema))
        assert rewritten.unenforced == ()
        assert sorted(map(dumps, rewritten.schema["enum"])) == sorted(map(dumps, values))


def test_branches_without_listed_values_are_not_searched_twice():
    links = {f"d{one}": {"anyOf": [{"$ref": f"#/$defs/d{one + 1}"}] * 2} for one in range(25)}
    document = {"$defs": links | {"d25": {"type": "string"}}, "$ref": "#/$defs/d0", "not": {"const": "a"}}
    prover = Prover(SchemaDocument(json.dumps(document)))
    assert values_left(prover, prover.document.root) is None
