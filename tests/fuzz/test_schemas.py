"""A share of the drawn schemas: no output that the schema as written refuses, no valid value refused."""

from __future__ import annotations

from decimal import Decimal

import pytest

from tests.fuzz.schemas.exact import Unjudged, is_valid, read
from tests.fuzz.schemas.walks import Report, check_schema

NUM_SCHEMAS = 200


def test_outputs_of_drawn_schemas_are_valid() -> None:
    report = Report()
    for seed in range(NUM_SCHEMAS):
        check_schema(seed, report)
    assert report.faults == []
    assert report.outcomes["served"] > NUM_SCHEMAS / 2
    assert report.num_outputs > NUM_SCHEMAS / 2


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ('{"const": 9007199254740993}', "9007199254740993.0", "9007199254740992"),
        ('{"multipleOf": 0.1}', "0.3", "0.35"),
        ('{"exclusiveMinimum": 0, "maximum": 0.5}', "0.5", "0.0"),
        ('{"uniqueItems": true}', "[1, true, 2]", "[1, 1.0]"),
        ('{"type": "integer"}', "1e2", "1.5"),
        ('{"pattern": "b$"}', '"ab"', '"ab\\n"'),
        ('{"oneOf": [{"minimum": 1}, {"maximum": 1}]}', "2", "1"),
        ('{"if": {"const": 1}, "then": false}', "2", "1"),
        ('{"propertyNames": {"maxLength": 1}}', '{"a": 1}', '{"ab": 1}'),
        ('{"items": {"$ref": "#"}, "maxItems": 1}', "[[[]]]", "[[], []]"),
        ('{"properties": {"a": true}, "patternProperties": {"b": true}, "additionalProperties": false}',
         '{"a": 1, "bb": 2}', '{"c": 1}'),
    ],
)  # fmt: skip
def test_the_second_validator_compares_exactly(schema: str, valid: str, invalid: str) -> None:
    assert is_valid(read(schema), read(valid))
    assert not is_valid(read(schema), read(invalid))
    assert isinstance(read("0.10"), Decimal)


def test_a_reference_to_itself_is_not_judged() -> None:
    with pytest.raises(Unjudged):
        is_valid(read('{"anyOf": [{"$ref": "#"}]}'), None)
