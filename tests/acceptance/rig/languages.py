"""Languages of structured outputs with validators that know no grammar backend. Knows no request.

Each has texts of a limited size, so that a model which draws its tokens nearly evenly comes to an end, too.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from string import Template
from typing import Any

import lark
import torch
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.exceptions import SchemaError
from tokenizers import Tokenizer

from engine_svc.features.structured_output.backends.backend import Matcher, Vocabulary
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind
from engine_svc.features.structured_output.extras import BACKENDS, StructuredOutput
from engine_svc.features.structured_output.grammars import Grammars

# Of public schemas: what is no longer is taken, and how long their strings, arrays and numbers may get.
_MAX_SCHEMA_CHARS, _MAX_PROPERTIES = 1500, 12
_MAX_LENGTH, _MAX_ITEMS, _MAX_NUMBER = 8, 2, 999
_BOUNDED_STRINGS = ("pattern", "format", "enum", "const")
# Texts of their own accord are limited, or they cannot be by another keyword.
_UNBOUNDED = ("patternProperties", "unevaluatedProperties", "unevaluatedItems", "$ref", "$dynamicRef")


_NUM_COMPLETIONS, _MAX_COMPLETION = 40, 1_000  # tries, and tokens of each
_CLOSING, _CLOSING_SHARE = '"}]),', 0.7  # characters of tokens that are preferred, and how often

# Patterns may be empty, texts are not. Decoders of some vocabularies drop a space at the beginning.
_BEGINS = ("=", " ", "\n", "a")
_ATOMS = (
    "[0-9]{1,3}", "[a-f]{2}", "[A-Z][a-z]{0,4}", "[^,;]{1,4}", "[а-я]{1,3}", ".{1,5}", r"[^\x00-\x7f]{1,2}",
    r"\x41\u00e9?", r"[\[\]{}]{1,3}", r"(?:yes|no|n\/a)", r"\s?[+*?.]",
)  # fmt: skip
_WORDS = ("/[a-z]{1,4}/", "/[A-Z][a-zé]{0,3}/", "/[0-9]{1,2}/", '("true" | "false" | "null")')
_NESTED = (
    'start: "$a" start "$b" | "$c"\n',
    'start: "$a" start "$a" | "$b" start "$b" | "$c"\n',
    'start: "$a" even | "$b"\neven: "$a" start\n',
    'start: "(" (start | WORD) ")"\n$word',
    'start: "[" (value ("," value)~0..3)? "]"\nvalue: WORD | start\n$word',
    'start: "<$a>" (start | WORD)~0..2 "</$a>"\n$word',
    'start: WORD ("," WORD)~1..2\n$word%ignore " "\n',
    'start: line~1..3\nline: KEY "=" WORD "\\n"\nKEY: "$a" | "$b"\n$word',
    'start: "{" pair (", " pair)~0..2 "}"\npair: KEY ": " (WORD | start)\nKEY: "$a" | "$b"\n$word',
    'start: sum\nsum: product (("+" | "-") product)~0..2\nproduct: one ("*" one)~0..1\n'
    'one: WORD | "(" sum ")"\n$word',
    'start: "SELECT " columns " FROM " NAME (" WHERE " NAME " = " WORD)?\n'
    'columns: NAME (", " NAME)~0..2\nNAME: /[a-z]{1,5}/\n$word',
    'start: call\ncall: NAME "(" (argument (", " argument)~0..1)? ")"\nargument: call | WORD\n'
    'NAME: "$a" | "$b"\n$word',
)


_FORMATS = FormatChecker()
_HOUR_AND_MINUTE = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = re.compile(
    rf"{_HOUR_AND_MINUTE}:([0-5][0-9]|60)(\.[0-9]+)?(z|[+-]{_HOUR_AND_MINUTE})", re.ASCII | re.IGNORECASE
)


@_FORMATS.checks("date", raises=ValueError)
def _is_date(value: object) -> bool:
    """By RFC 3339, which has a year 0, a leap year."""
    if not isinstance(value, str):
        return True
    date.fromisoformat(value.replace("0000", "2000", 1) if value.startswith("0000-") else value)
    return re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", value) is not None


@_FORMATS.checks("time")
def _is_time(value: object) -> bool:
    """By RFC 3339, with a zone. Without rfc3339-validator, jsonschema has that of draft 3, without one."""
    return not isinstance(value, str) or _TIME.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class Language:
    """kind: of the table that shows it; `accepts` raises nothing, whatever the text."""

    kind: str
    constraint: Constraint
    accepts: Callable[[str], bool]


def schema_language(kind: str, schema: dict[str, Any]) -> Language:
    validator = Draft202012Validator(schema, format_checker=_FORMATS)

    def accepts(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except ValueError:
            return False

    return Language(kind, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(schema)), accepts)


def regex_language(pattern: str) -> Language:
    compiled = re.compile(pattern)
    return Language(
        "regex", Constraint(ConstraintKind.REGEX, pattern), lambda text: bool(compiled.fullmatch(text))
    )


def lark_language(grammar: str) -> Language:
    # The other lexers know not every text of a grammar whose terminals overlap.
    parser = lark.Lark(grammar, parser="earley", lexer="dynamic_complete")

    def accepts(text: str) -> bool:
        try:
            parser.parse(text)
        except lark.exceptions.LarkError:
            return False
        return True

    return Language("Lark", Constraint(ConstraintKind.GRAMMAR, grammar), accepts)


def make_languages(
    num_schemas: int, num_patterns: int, num_grammars: int, *, public: Path | None = None, seed: int = 33
) -> list[Language]:
    """Languages of all kinds, mixed. Half of the schemas are from `public`, a folder of MaskBench."""
    rng = random.Random(seed)
    languages: list[Language] = []
    if public is not None:
        languages += public_languages(public, num_schemas // 2, rng)
    languages += [
        schema_language("schema", _shared(make_schema(rng)) if index % 8 == 0 else make_schema(rng, 3))
        for index in range(num_schemas - len(languages))
    ]
    languages += [regex_language(rng.choice(_BEGINS) + make_pattern(rng)[0]) for _ in range(num_patterns)]
    languages += [lark_language(make_grammar(rng, index)) for index in range(num_grammars)]
    rng.shuffle(languages)
    return languages


def make_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["integer", "number", "boolean", "enum", "string", "pattern", "date"]
    kinds += ["object", "object", "array", "tuple", "anyOf", "allOf"] if depth else []
    match rng.choice(kinds):
        case "integer":
            least = rng.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 200)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 9), "multipleOf": 0.25}
        case "boolean":
            return {"type": rng.choice(["boolean", "null"])}
        case "enum":
            return {"enum": rng.sample(["red", "grün", "日本", 1, 2.5, None, True, "a b"], rng.randint(1, 3))}
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 8)}
        case "pattern":
            patterns = [
                "^[a-c]{1,4}$",
                "^x-[0-9]{2}$",
                "^(ab|cd)+e$",
                "^[α-ω]{2,3}$",
                r"^[0-9]{1,3}(\.[0-9])?$",
            ]
            return {"type": "string", "pattern": rng.choice(patterns)}
        case "date":
            return {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])}
        case "array":
            least = rng.randint(0, 1)
            items = make_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
        case "tuple":
            first = [make_schema(rng, depth - 1) for _ in range(2)]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": 2}
        case "anyOf":
            return {"anyOf": [make_schema(rng, depth - 1) for _ in range(2)]}
        case "allOf":
            least = rng.randint(0, 9)
            return {"type": "integer", "allOf": [{"minimum": least}, {"maximum": least + 30}]}
        case _:
            names = rng.sample(["name", "size", "kind", "id", "is_new", "größe"], rng.randint(1, 3))
            return {
                "type": "object",
                "properties": {name: make_schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randint(1, len(names))),
                "additionalProperties": False,
            }


def _shared(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that refers to this one twice."""
    entry = {"$ref": "#/$defs/entry"}
    properties = {"first": entry, "others": {"type": "array", "items": entry, "maxItems": 2}}
    return {
        "$defs": {"entry": schema},
        "type": "object",
        "properties": properties,
        "required": ["first"],
        "additionalProperties": False,
    }


def make_pattern(rng: random.Random, depth: int = 3) -> tuple[str, str]:
    """The same language as a regular expression and as the right side of a rule.

    Without classes such as \\d, whose characters depend on the version of Unicode.
    """
    if not depth or rng.random() < 0.2:
        if rng.random() < 0.4:
            text = "".join(rng.choices("abcxyzäß→😀", k=rng.randint(1, 3)))
            return text, json.dumps(text, ensure_ascii=False)
        counted = rng.choice(_ATOMS)
        return counted, f"/{counted}/"
    if rng.random() < 0.3:
        pattern, rule = make_pattern(rng, depth - 1)
        return rng.choice([(f"(?:{pattern})?", f"({rule})?"), (f"(?:{pattern}){{1,3}}", f"({rule})~1..3")])
    parts = [make_pattern(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    patterns, rules = zip(*parts, strict=True)
    if rng.random() < 0.5:
        return f"(?:{'|'.join(patterns)})", f"({' | '.join(rules)})"
    return "-".join(patterns), ' "-" '.join(rules)


def make_grammar(rng: random.Random, index: int) -> str:
    """Every third is a regular language, the others are nested."""
    if index % 3 == 0:
        return f"start: {json.dumps(rng.choice(_BEGINS))} {make_pattern(rng)[1]}\n"
    first, second, third = rng.sample("abcdefgh", 3)
    form = Template(_NESTED[(index - index // 3) % len(_NESTED)])
    return form.substitute(a=first, b=second, c=third, word=f"WORD: {rng.choice(_WORDS)}\n")


def public_languages(folder: Path, number: int, rng: random.Random) -> list[Language]:
    """Schemas of MaskBench that can be limited in size and are served."""
    paths = sorted(folder.glob("*.json"))
    rng.shuffle(paths)
    found: list[Language] = []
    for path in paths:
        if len(found) == number:
            break
        schema = json.loads(path.read_text(encoding="utf-8"))["schema"]
        if _can_be_limited(schema):
            found.append(schema_language("public schema", limited(schema)))
    return found


def _can_be_limited(schema: Any) -> bool:
    if not isinstance(schema, dict) or len(json.dumps(schema)) > _MAX_SCHEMA_CHARS:
        return False
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        return False
    if "2020-12" not in schema.get("$schema", "2020-12"):
        return False
    return all(
        not any(name in part for name in _UNBOUNDED)
        and len(part.get("properties", ())) <= _MAX_PROPERTIES
        and set(part.get("required", ())) <= set(part.get("properties", ()))
        and _is_anchored(part.get("pattern", "^$"))
        and ("type" in part or "enum" in part or "const" in part or "anyOf" in part or "oneOf" in part)
        for part in _parts(schema)
    )


def _is_anchored(pattern: str) -> bool:
    """Otherwise any text may stand before or behind what matches."""
    return pattern.startswith("^") and pattern.endswith("$") and "|" not in pattern


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and those inside it that say what a value is."""
    if not isinstance(schema, dict):
        return
    yield schema
    for part in schema.get("properties", {}).values():
        yield from _parts(part)
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(name, ()):
            yield from _parts(part)
    yield from _parts(schema.get("items"))


def limited(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with limits on what it leaves open."""
    limits: dict[str, Any] = {}
    types = _types(schema)
    if "string" in types and not any(name in schema for name in _BOUNDED_STRINGS):
        limits["maxLength"] = max(
            min(_MAX_LENGTH, schema.get("maxLength", _MAX_LENGTH)), schema.get("minLength", 0)
        )
    if "array" in types and "maxItems" not in schema:
        limits["maxItems"] = max(_MAX_ITEMS, schema.get("minItems", 0))
    if {"number", "integer"} & set(types) and not {"enum", "const"} & set(schema):
        least = schema.get("minimum", schema.get("exclusiveMinimum", 0))
        limits |= {"minimum": least, "maximum": least + _MAX_NUMBER} if "maximum" not in schema else {}
        if "number" in types and "multipleOf" not in schema:
            limits["multipleOf"] = 0.25  # else digits have no limit
    if "object" in types or "properties" in schema:
        limits["additionalProperties"] = False
    written = {**schema, **limits}
    if "properties" in written:
        written["properties"] = {name: _limited(part) for name, part in written["properties"].items()}
    for name in ("anyOf", "oneOf", "allOf"):
        if name in written:
            written[name] = [_limited(part) for part in written[name]]
    if "items" in written:
        written["items"] = _limited(written["items"])
    return written


def _limited(part: Any) -> Any:
    return limited(part) if isinstance(part, dict) else part


def _types(schema: dict[str, Any]) -> Sequence[str]:
    types = schema.get("type", ())
    return (types,) if isinstance(types, str) else types


class Completions:
    """Completes answers that were cut, by the grammar that an engine would have continued with.

    That a completion is a text of the language is for its validator to say.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._num_words = vocabulary.num_words
        self._tokenizer = tokenizer = Tokenizer.from_str(vocabulary.tokenizer_json)
        self._grammars = Grammars(vocabulary, num_threads=1, max_entries=0, max_bytes=0)
        texts = ((token, tokenizer.decode([token]).strip()) for token in tokenizer.get_vocab().values())
        closing = [token for token, text in texts if text and set(text) <= set(_CLOSING)]
        self._closing = torch.tensor(sorted(closing))

    def close(self) -> None:
        self._grammars.close()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def is_viable(self, language: Language, token_ids: Sequence[int], text: str) -> bool:
        """Whether one of some completions is accepted. text: of the tokens."""
        compiled = self._grammars.compile(StructuredOutput(language.constraint, BACKENDS)).compiled
        for seed in range(_NUM_COMPLETIONS):
            matcher = compiled.matcher()
            if matcher.accept(token_ids) < len(token_ids):
                return False
            added = self._completed(matcher, random.Random(seed))
            if added is not None and language.accepts(self._text([*token_ids, *added], text)):
                return True
        return False

    def _completed(self, matcher: Matcher, choose: random.Random) -> list[int] | None:
        added: list[int] = []
        masks = torch.zeros((1, self._num_words), dtype=torch.int32)
        while len(added) < _MAX_COMPLETION:
            if matcher.is_accepting:
                return added
            matcher.fill_mask(masks, 0)
            bits = ((masks[0][:, None] >> torch.arange(32)) & 1).flatten().bool()
            closing = self._closing[bits[self._closing]].tolist()
            some = (
                closing if closing and choose.random() < _CLOSING_SHARE else bits.nonzero().flatten().tolist()
            )
            token = choose.choice(some)
            matcher.accept([token])
            added.append(token)
        return None

    def _text(self, token_ids: list[int], begin: str) -> str:
        """Of the tokens, which begin with those of a text, whose last character may not be whole."""
        text = str(self._tokenizer.decode(token_ids))
        if not begin.startswith(" ") or text.startswith(begin.rstrip("\N{REPLACEMENT CHARACTER}")):
            return text
        return " " + text  # which decoders drop where a text begins
