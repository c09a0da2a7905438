"""Many constraints at temperature 1, in large batches: answers are in their language by other validators."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import regex
from jsonschema import Draft202012Validator, FormatChecker

from engine_svc.core.request import FinishReason
from service_kit.grammars.constraint import ConstraintKind
from tests.engine_svc.features.structured_output.engine_rig import (
    Asked,
    Rig,
    regex_spec,
    schema_spec,
    spec,
    text_of,
)

NUM_SCHEMAS, NUM_PATTERNS, NUM_GRAMMARS = 300, 100, 50
MAX_TOKENS = 160
LEAST_FINISHED = 0.9

Check = Callable[[str, bool], None]  # an answer, and whether it is whole


@dataclass(frozen=True)
class Language:
    asked: Asked
    check: Check


def make_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose instances have a limited size."""
    kinds = ["integer", "number", "boolean", "enum", "string", "pattern", "date"]
    kinds += ["object", "object", "array", "anyOf"] if depth else []
    match rng.choice(kinds):
        case "integer":
            least = rng.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 200)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9)}
        case "boolean":
            return {"type": rng.choice(["boolean", "null"])}
        case "enum":
            return {"enum": rng.sample(["red", "green", 1, 2.5, None, True, "a b"], rng.randint(1, 3))}
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(["^[a-c]{1,4}$", "^x-[0-9]{2}$", "^(ab|cd)+e$"])}
        case "date":
            return {"type": "string", "format": "date"}
        case "array":
            least = rng.randint(0, 1)
            items = make_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [make_schema(rng, depth - 1) for _ in range(2)]}
        case _:
            names = rng.sample(["name", "size", "kind", "id", "is_new"], rng.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: make_schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randint(1, len(names))),
                "additionalProperties": False,
            }


def make_pattern(rng: random.Random, depth: int = 3) -> tuple[str, str]:
    """The same language as a regular expression and as the right side of a rule."""
    if not depth or rng.random() < 0.2:
        if rng.random() < 0.5:
            text = "".join(rng.choices("abcxyz", k=rng.randint(1, 3)))
            return text, json.dumps(text)
        counted = rng.choice(["[0-9]{1,3}", "[a-f]{2}", "[A-Z][a-z]{0,4}"])
        return counted, f"/{counted}/"
    if rng.random() < 0.3:
        pattern, rule = make_pattern(rng, depth - 1)
        return rng.choice([(f"(?:{pattern})?", f"({rule})?"), (f"(?:{pattern}){{1,3}}", f"({rule}){{1,3}}")])
    parts = [make_pattern(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    patterns, rules = zip(*parts, strict=True)
    if rng.random() < 0.5:
        return f"(?:{'|'.join(patterns)})", f"({' | '.join(rules)})"
    return "-".join(patterns), ' "-" '.join(rules)


def schema_language(rng: random.Random) -> Language:
    schema = make_schema(rng)
    validator = Draft202012Validator(schema, format_checker=FormatChecker())

    def check(text: str, is_whole: bool) -> None:
        if is_whole:
            validator.validate(json.loads(text))

    return Language(Asked(schema_spec(schema)), check)


def pattern_language(rng: random.Random, *, is_grammar: bool) -> Language:
    pattern, rule = make_pattern(rng)
    pattern, rule = f"={pattern}", f'"=" {rule}'  # never empty

    def check(text: str, is_whole: bool) -> None:
        assert regex.fullmatch(pattern, text, partial=not is_whole), (pattern, text)

    if is_grammar:
        return Language(Asked(spec(ConstraintKind.GRAMMAR, f"start: {rule}\n")), check)
    return Language(Asked(regex_spec(pattern)), check)


def make_languages() -> list[Language]:
    rng = random.Random(33)
    languages = [schema_language(rng) for _ in range(NUM_SCHEMAS)]
    languages += [pattern_language(rng, is_grammar=False) for _ in range(NUM_PATTERNS)]
    languages += [pattern_language(rng, is_grammar=True) for _ in range(NUM_GRAMMARS)]
    rng.shuffle(languages)
    for language in languages:
        language.asked.options["max_tokens"] = MAX_TOKENS
    return languages


@pytest.mark.chaos
def test_answers_are_in_their_languages_and_the_same_under_preemption():
    languages = make_languages()
    asked = [language.asked for language in languages]
    batches = Rig(max_num_seqs=64)
    crowded = Rig(max_num_seqs=24, block_size=4, num_kv_blocks=300, max_num_batched_tokens=48)
    try:
        answers, others = batches.answer(asked), crowded.answer(asked)
    finally:
        batches.close()
        crowded.close()
    num_whole = 0
    for language, answered in zip(languages, answers, strict=True):
        is_whole = answered.end.reason is FinishReason.STOP
        assert is_whole or answered.end.reason is FinishReason.LENGTH, answered.end
        language.check(text_of(answered.token_ids), is_whole)
        num_whole += is_whole
    assert num_whole >= LEAST_FINISHED * len(languages)
    assert [one.token_ids for one in answers] == [one.token_ids for one in others]
    assert sum(one.request.num_preemptions for one in others) > 0
