"""Checks a drawn schema in process: drawn instances, and outputs of random walks over the masks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from engine_svc.features.structured_output.check import ConstraintRefused, check
from engine_svc.features.structured_output.constraint import Constraint, ConstraintKind
from engine_svc.features.structured_output.llguidance_text import grammar_error, grammar_text, parser_limits
from tests.fuzz.schemas.draws import Draws
from tests.fuzz.schemas.exact import Unjudged, is_number, is_valid, read, written

MAX_BYTES = 160  # of a walk
_NUM_WALKS = 2
_NUM_INSTANCES = 10
_BYTES = LLTokenizer("byte")
_ENDS = b'"}],:'
_SPELLED = frozenset("\b\f\n\r\t")
_REFUSALS = ("CONSTRAINT_INVALID", "CONSTRAINT_NOT_ENFORCED", "CONSTRAINT_TOO_COMPLEX")
_FOREIGN = ("llguidance", "Failed to", "panic", "Unsatisfiable schema", "disjoint", "sibling")  # its messages


@dataclass(slots=True)
class Report:
    """Counts of schemas by outcome, and the faults."""

    num_schemas: int = 0
    num_instances: int = 0
    num_outputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, str]] = field(default_factory=list)

    def add(self, seed: object, kind: str, schema: str, detail: str) -> None:
        """Add a fault."""
        self.faults.append({"seed": str(seed), "kind": kind, "schema": schema, "detail": detail})

    def as_json(self) -> dict[str, object]:
        return {
            "num_schemas": self.num_schemas,
            "num_instances": self.num_instances,
            "num_outputs": self.num_outputs,
            "outcomes": dict(self.outcomes.most_common()),
            "faults": self.faults,
        }


def check_schema(seed: object, report: Report) -> None:
    """Draw a schema, and add its outcome and its faults to the report."""
    draws = Draws(seed)
    text = written(draws.schema)
    instances = draws.instances(_NUM_INSTANCES)

    def fault(kind: str, detail: str) -> None:
        report.add(seed, kind, text, detail)

    report.num_schemas += 1
    try:
        valid = [is_valid(draws.schema, instance) for instance in instances]
    except Unjudged:
        report.outcomes["not judged"] += 1
        return
    try:
        grammar = grammar_of(text)
    except ConstraintRefused as refused:
        report.outcomes[refused.reason] += 1
        if refused.reason not in _REFUSALS or any(word in str(refused) for word in _FOREIGN):
            fault("refused in foreign words", str(refused))
        if refused.reason == "CONSTRAINT_INVALID" and "leads to itself" not in str(refused):
            for instance, is_fine in zip(instances, valid, strict=True):
                if is_fine and _is_spelled(instance):
                    fault("refused as empty", f"{refused}: {written(instance)}")
        return
    report.outcomes["served"] += 1
    report.num_instances += len(instances)
    matcher = LLMatcher(_BYTES, grammar, log_level=0, limits=parser_limits())
    for instance, is_fine in zip(instances, valid, strict=True):
        spelled = text_of(instance)
        is_taken = _takes(matcher, spelled)
        if is_taken and not is_fine:
            fault("allowed an invalid value", spelled)
        elif is_fine and not is_taken and _is_spelled(instance):
            fault("refused a valid value", spelled)
    for number in range(_NUM_WALKS):
        output, ending = walk(matcher.deep_copy(), random.Random(f"{seed}/{number}"))
        report.num_outputs += ending == "end"
        if ending == "stuck":
            fault("stuck", output.decode(errors="replace"))
        elif ending == "end":
            with suppress(Unjudged):
                if words := wrong_output(draws.schema, output):
                    fault("wrong output", f"{words}: {output.decode(errors='replace')}")


def grammar_of(text: str) -> str:
    """The schema as the grammar that an engine compiles. Raises ConstraintRefused."""

    def write(_backend: str, rewritten: Constraint, _is_last: bool) -> str:
        grammar = grammar_text(rewritten, {})
        matcher = LLMatcher(_BYTES, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise grammar_error(rewritten, matcher.get_error())
        return grammar

    return check(Constraint(ConstraintKind.JSON_SCHEMA, text), ("llguidance",), write).grammar


def walk(matcher: LLMatcher, noise: random.Random) -> tuple[bytes, str]:
    """Bytes drawn from the masks, and how the walk ended: "end", "stuck" or "long"."""
    output = bytearray()
    while len(output) < MAX_BYTES:
        mask = matcher.compute_bitmask()
        is_accepting = matcher.is_accepting()
        choices = [byte for byte in _bits(mask) if byte < 256]
        if not choices:
            return bytes(output), "end" if is_accepting else "stuck"
        if is_accepting and noise.random() < 0.3:
            return bytes(output), "end"
        ends = [byte for byte in choices if byte in _ENDS]
        byte = noise.choice(ends if ends and noise.random() < 0.4 else choices)
        if not matcher.consume_token(byte):
            return bytes(output), "stuck"
        output.append(byte)
    return bytes(output), "long"


def _bits(mask: bytes) -> Iterator[int]:
    for index, part in enumerate(mask):
        while part:
            low = part & -part
            yield 8 * index + low.bit_length() - 1
            part ^= low


def _takes(matcher: LLMatcher, text: str) -> bool:
    copy = matcher.deep_copy()
    return all(copy.consume_token(byte) for byte in text.encode()) and bool(copy.is_accepting())


def wrong_output(schema: Any, output: bytes) -> str:
    """The fault of an output in words; empty if the schema as written allows it. Raises Unjudged."""
    try:
        value = read(output.decode())
    except Unjudged:
        raise
    except ValueError as error:
        return f"no JSON ({error})"
    return "" if is_valid(schema, value) else "invalid"


def text_of(value: Any) -> str:
    """A value as outputs spell it: integers without a fraction, numbers without an exponent."""
    if isinstance(value, Decimal):
        whole = int(value)
        return str(whole) if whole == value else f"{value:f}".rstrip("0")
    if isinstance(value, list):
        return "[" + ", ".join(map(text_of, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {text_of(entry)}" for key, entry in value.items()) + "}"
    return written(value)


def _is_spelled(value: Any) -> bool:
    """Whether outputs have a form for the value, as documented: texts have short escapes alone."""
    if isinstance(value, str):
        return all(character in _SPELLED or (" " <= character != "\x7f") for character in value)
    if isinstance(value, list):
        return all(map(_is_spelled, value))
    if isinstance(value, dict):
        return all(_is_spelled(name) and _is_spelled(entry) for name, entry in value.items())
    return value is None or isinstance(value, bool) or is_number(value)
