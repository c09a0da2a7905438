"""JSON schemas that `auto` serves correctly, beside each grammar backend alone, per subset of MaskBench.

    python -m tests.acceptance schema_coverage FOLDER --json benchmarks/results/schema_coverage.json

FOLDER holds files of MaskBench: {"schema": ..., "tests": [{"data": ..., "valid": ...}]}. `auto` compiles as a
request would, the others compile the schema as it is. A schema is served correctly if the grammar

- allows each valid test, with its keys as they stand or in the schema's order, and no invalid one,
- produces answers, drawn evenly from what it allows, that satisfy an independent validator, at least one of
  them or of the tests, so that a grammar without instances is not counted,
- tells variants of tests and answers apart as the validator does: invalid ones are refused, valid ones in
  which something was left out or a text was not changed are allowed,
- comes from a backend that enforces the schema's keywords: each is probed once alone. A backend that takes
  the probe and allows its invalid instance ignores this keyword, wherever it stands.

Promised: in each subset `auto` serves at least as many as the better of the others.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import random
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jsonschema import Draft202012Validator, FormatChecker
from jsonschema.validators import validator_for
from tokenizers import Tokenizer

import triptych_cli.tiny_model
from benchmarks.report import Report, Row, Value
from engine_svc.features.structured_output.backends.backend import (
    CompiledGrammar,
    GrammarBackend,
    MatcherError,
    Vocabulary,
)
from engine_svc.features.structured_output.backends.llguidance_backend import LLGuidanceBackend
from engine_svc.features.structured_output.backends.xgrammar_backend import XGrammarBackend
from engine_svc.features.structured_output.check import ConstraintRefused, check
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind, GrammarError
from engine_svc.features.structured_output.json_schema.rules import FORMATS

TIME_LIMIT_S = 20  # of one judgement, in CPU time
NUM_SAMPLES = 4
NUM_VARIANTS = 80
MAX_TOKENS = 600
_FREE_TOKENS = 60  # from there on an answer ends as soon as it may

_TOKENIZER_JSON = (Path(triptych_cli.tiny_model.__file__).parent / "weights" / "tokenizer.json").read_text()
_TOKENIZER = Tokenizer.from_str(_TOKENIZER_JSON)
_VOCABULARY = Vocabulary(_TOKENIZER_JSON, _TOKENIZER.get_vocab_size(), (0,))
_BACKENDS: dict[str, GrammarBackend] = {
    "llguidance": LLGuidanceBackend(_VOCABULARY),
    "xgrammar": XGrammarBackend(_VOCABULARY),
}
_QUOTE, *_BRACKETS = (_TOKENIZER.encode(text).ids[0] for text in ('"', "}", "]"))
_IN_TEXT = re.compile(r'(?:[^"]|"(?:[^"\\]|\\.)*")*"(?:[^"\\]|\\.)*', re.DOTALL)
_SUBSET_END = re.compile(r"(---|_\d|_java|_sql|_simple|_multiple|_parallel).*")
_FORMAT_CHECKER = FormatChecker(FORMATS & FormatChecker.checkers.keys())
_OTHERS: tuple[Any, ...] = (None, True, 0, -1, 1.5, 1_000_000, "", "x", [], [0], {}, {"zz": 0})

_LOOKAROUND = re.compile(r"\(\?<?[=!]")
# Keywords that backends are known to leave out in silence: a schema, an instance that it does not have.
_PROBES: dict[str, tuple[Any, Any]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": True}, [0, 0]),
    "contains": ({"type": "array", "contains": {"const": 1}}, [0]),
    "not": ({"type": "integer", "not": {"const": 1}}, 1),
    "if": ({"type": "integer", "if": {"minimum": 1}, "then": {"maximum": 2}}, 3),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, {"a": 1}),
    "dependencies": ({"type": "object", "dependencies": {"a": ["b"]}}, {"a": 1}),
    "dependentSchemas": ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"b": 1}),
    "minProperties": ({"type": "object", "minProperties": 1}, {}),
    "maxProperties": ({"type": "object", "maxProperties": 1}, {"a": 1, "b": 1}),
    "multipleOf": ({"type": "integer", "multipleOf": 2}, 3),
    "lookaround": ({"type": "string", "pattern": "^(?!a)[ab]+$"}, "ab"),
}


@dataclass(frozen=True, slots=True)
class Variant:
    value: Any
    must_be_allowed: bool
    is_valid: bool


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-subset", type=int, default=60, help="schemas of each subset")
    parser.add_argument("--skip", type=int, default=0, help="schemas of each subset before them")
    parser.add_argument("--subset", action="append", help="only this one; may be given again")
    parser.add_argument("--show", action="store_true", help="print schemas that auto does not serve")


def run(options: argparse.Namespace) -> Report:
    subsets: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(options.folder.glob("*.json")):
        subsets[_SUBSET_END.sub("", path.stem)].append(path)
    rows: list[Row] = []
    shortfalls = []
    for subset, paths in subsets.items():
        random.Random(5).shuffle(paths)
        if options.subset and subset not in options.subset:
            continue
        found = {name: Counter[str]() for name in _COMPILERS}
        for path in paths[options.skip :][: options.per_subset]:
            verdicts = _verdicts(json.loads(path.read_text()))
            for name, verdict in verdicts.items():
                found[name][verdict] += 1
            if options.show and verdicts["auto"] != "correct":
                print(path.stem, verdicts, flush=True)
        rows += [_row(subset, name, counts) for name, counts in found.items()]
        best = max(counts["correct"] for name, counts in found.items() if name != "auto")
        if found["auto"]["correct"] < best:
            shortfalls.append(f"{subset}: auto serves {found['auto']['correct']}, a backend alone {best}")
    rows += _totals(rows)
    settings = {"per_subset": options.per_subset, "skip": options.skip}
    return Report("schema_coverage", settings, rows, shortfalls)


_VERDICTS = (
    "correct",
    "refused",
    "ignores a keyword",
    "refuses valid",
    "allows invalid",
    "no instance",
    "time limit",
)


def _row(subset: str, compiler: str, counts: Counter[str]) -> Row:
    columns: dict[str, Value] = {verdict.replace(" ", "_"): counts[verdict] for verdict in _VERDICTS}
    return {"subset": subset, "compiler": compiler, "schemas": counts.total(), **columns}


def _totals(rows: list[Row]) -> list[Row]:
    totals = []
    for name in _COMPILERS:
        counts = Counter[str]()
        for row in rows:
            if row["compiler"] == name:
                counts.update({verdict: int(str(row[verdict.replace(" ", "_")])) for verdict in _VERDICTS})
        totals.append(_row("all", name, counts))
    return totals


def _verdicts(case: dict[str, Any]) -> dict[str, str]:
    variants = _isolated(partial(_judged_variants, case)) or []
    words = set(_words(case["schema"]))
    return {
        name: _isolated(partial(_verdict, compiler, case, variants, words & _ignored(name))) or "time limit"
        for name, compiler in _COMPILERS.items()
    }


# Compilers


def _auto(text: str) -> CompiledGrammar:
    served = check(Constraint(ConstraintKind.JSON_SCHEMA, text), tuple(_BACKENDS), _written)
    return _BACKENDS[served.backend].compile(served.constraint, served.grammar)


def _written(backend: str, constraint: Constraint, is_last: bool) -> str:
    """Whether llguidance can compile it decides what follows, as in an engine."""
    if backend == "llguidance":
        _BACKENDS[backend].compile(constraint)
    return ""


def _alone(backend: str) -> Callable[[str], CompiledGrammar]:
    # Of xgrammar as it is: what it ignores, and our backend refuses, is found by its probes.
    is_lenient = backend == "xgrammar"
    return lambda text: _BACKENDS[backend].compile(
        Constraint(ConstraintKind.JSON_SCHEMA, text, is_lenient=is_lenient)
    )


_COMPILERS = {"auto": _auto, "llguidance": _alone("llguidance"), "xgrammar": _alone("xgrammar")}


@cache
def _ignored(compiler: str) -> frozenset[str]:
    return frozenset(
        word for word, probe in _PROBES.items() if _isolated(partial(_ignores, compiler, *probe))
    )


def _ignores(compiler: str, schema: Any, invalid: Any) -> bool:
    try:
        return _allows(_COMPILERS[compiler](json.dumps(schema)), invalid)
    except (GrammarError, ConstraintRefused):
        return False


def _words(schema: Any) -> Iterator[str]:
    """Probed keywords that a schema has somewhere."""
    if isinstance(schema, list):
        for entry in schema:
            yield from _words(entry)
    elif isinstance(schema, dict):
        for name, value in schema.items():
            if name in ("properties", "definitions", "$defs", "patternProperties") and isinstance(
                value, dict
            ):
                yield from _words(list(value.values()))
                if name == "patternProperties" and any(map(_LOOKAROUND.search, value)):
                    yield "lookaround"
            elif name not in ("const", "enum", "default", "examples"):
                if name in _PROBES and value is not False:
                    yield name
                if name == "pattern" and _LOOKAROUND.search(str(value)):
                    yield "lookaround"
                yield from _words(value)


# Judgement of one schema


def _verdict(
    compile_schema: Callable[[str], CompiledGrammar],
    case: dict[str, Any],
    variants: list[Variant],
    ignored: set[str],
) -> str:
    try:
        grammar = compile_schema(json.dumps(case["schema"]))
    except (GrammarError, ConstraintRefused):
        return "refused"
    if ignored:
        return "ignores a keyword"
    tests = case.get("tests", ())
    orders = list(_orders(case["schema"]))
    for test in tests:
        if _takes(grammar, test["data"], orders) != test["valid"]:
            return "refuses valid" if test["valid"] else "allows invalid"
    try:
        answers = _answers(grammar)
    except (MatcherError, ValueError):
        return "allows invalid"
    validator = _validator(case["schema"])
    if not all(validator.is_valid(answer) for answer in answers):
        return "allows invalid"
    if not answers and not any(test["valid"] for test in tests):
        return "no instance"
    for variant in (*variants, *_variants_of(case["schema"], answers)):
        is_allowed = _takes(grammar, variant.value, orders)
        if is_allowed and not variant.is_valid:
            return "allows invalid"
        if not is_allowed and variant.is_valid and variant.must_be_allowed:
            return "refuses valid"
    return "correct"


def _validator(schema: Any) -> Any:
    return validator_for(schema, default=Draft202012Validator)(schema, format_checker=_FORMAT_CHECKER)


def _allows(grammar: CompiledGrammar, value: object) -> bool:
    tokens = _TOKENIZER.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False).ids
    matcher = grammar.matcher()
    return matcher.accept(tokens) == len(tokens) and matcher.is_accepting


def _takes(grammar: CompiledGrammar, value: object, orders: list[list[str]]) -> bool:
    """Whether a value is allowed, with its keys as they stand or in the schema's order, fixed by backends."""
    return _allows(grammar, value) or _allows(grammar, _in_order(value, orders))


def _in_order(value: Any, orders: list[list[str]]) -> Any:
    if isinstance(value, list):
        return [_in_order(entry, orders) for entry in value]
    if not isinstance(value, dict):
        return value
    own = max(orders, key=lambda names: (len(value.keys() & set(names)), -len(names)), default=[])
    known = [name for name in own if name in value]
    return {name: _in_order(value[name], orders) for name in dict.fromkeys([*known, *value])}


def _answers(grammar: CompiledGrammar) -> list[Any]:
    answers = []
    for seed in range(NUM_SAMPLES):
        text = _answer(grammar, random.Random(seed))
        if text is not None:
            answers.append(json.loads(text))
    return answers


def _answer(grammar: CompiledGrammar, noise: random.Random) -> str | None:
    """An answer, in which the end is likelier than it would be; None without an end."""
    matcher = grammar.matcher()
    tokens: list[int] = []
    masks = torch.zeros((1, _VOCABULARY.num_words), dtype=torch.int32)
    words = masks.numpy().view(np.uint8)[0]
    for _ in range(MAX_TOKENS):
        matcher.fill_mask(masks, 0)
        bits = np.unpackbits(words, bitorder="little")[: _VOCABULARY.size]
        text = _TOKENIZER.decode(tokens, skip_special_tokens=False)
        ends = [_QUOTE] if _IN_TEXT.fullmatch(text) else [0, *_BRACKETS]
        closing = [token for token in ends if bits[token]]
        is_closing = bool(closing) and (len(tokens) > _FREE_TOKENS or noise.random() < 0.2)
        token = closing[0] if is_closing else int(noise.choice(bits.nonzero()[0]))
        matcher.accept([token])
        if token == 0:
            return str(_TOKENIZER.decode(tokens, skip_special_tokens=False))
        tokens.append(token)
    return None


# Variants of instances


def _judged_variants(case: dict[str, Any]) -> list[Variant]:
    return _variants_of(case["schema"], [test["data"] for test in case.get("tests", ()) if test["valid"]])


def _variants_of(schema: Any, instances: list[Any]) -> list[Variant]:
    noise = random.Random(7)
    names = ["zz", *sorted({name for names in _orders(schema) for name in names})]
    validator = _validator(schema)
    places = [(instance, path) for instance in instances[:4] for path in _paths(instance)]
    found = []
    for _ in range(NUM_VARIANTS if places else 0):
        instance, path = noise.choice(places)
        value, must_be_allowed = _edited(instance, path, noise, names)
        if "Infinity" not in json.dumps(value):  # of an answer with a number like 1e999
            found.append(Variant(value, must_be_allowed, validator.is_valid(value)))
    return found


def _orders(schema: Any) -> Iterator[list[str]]:
    """The names of each `properties` in a schema."""
    if isinstance(schema, list):
        for entry in schema:
            yield from _orders(entry)
    elif isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield list(schema["properties"])
        for entry in schema.values():
            yield from _orders(entry)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, part in parts:
        yield from _paths(part, (*path, step))


def _edited(instance: Any, path: tuple[Any, ...], noise: random.Random, names: list[str]) -> tuple[Any, bool]:
    """The instance with one part changed, and whether it must be allowed if it is valid.

    Not with new keys, whose order backends fix, and not with new texts: the validator reads formats and
    classes of patterns in another way.
    """
    edited = {"": copy.deepcopy(instance)}
    parent: Any = edited
    last: Any = ""
    for step in path:
        parent, last = parent[last], step
    parent[last], must_be_allowed = _changed(parent[last], noise, names)
    return edited[""], must_be_allowed


def _changed(value: Any, noise: random.Random, names: list[str]) -> tuple[Any, bool]:
    if isinstance(value, bool | None) or noise.random() < 0.2:
        other = noise.choice(_OTHERS)
        return other, not isinstance(other, str | dict)
    if isinstance(value, str):
        return noise.choice([value + "x", value[:-1], "@@" + value, value + "é", value * 3]), False
    if isinstance(value, int | float):
        other = noise.choice([value + 1, -value or 0, value * 1000, value + 0.5])
        # Integers have one spelling, which a sum of floats may round to another one.
        return int(other) if isinstance(other, float) and other.is_integer() else other, True
    if isinstance(value, list):
        return noise.choice([value[:-1], value + value[-1:], value + value]), True
    key = noise.choice([*value, *names])
    if key not in value:
        return value | {key: noise.choice([None, 0, "x", {}])}, False
    rest = {name: entry for name, entry in value.items() if name != key}
    return (rest, True) if noise.random() < 0.7 else (rest | {"@@" + key: value[key]}, False)


def _isolated(call: Callable[[], Any]) -> Any:
    """The result of a call in a child process; None where a limit ends it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # xgrammar writes warnings
        try:
            found = pickle.dumps(call())
        except BaseException as error:  # noqa: BLE001  # the child must not go on as its parent
            found = pickle.dumps(RuntimeError(repr(error)))
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(found)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read()
    os.waitpid(child, 0)
    returned = pickle.loads(found) if found else None
    if isinstance(returned, RuntimeError):
        raise returned
    return returned
