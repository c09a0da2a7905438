"""The process that compiles constraints first: its limits, and that it goes on for others."""

from __future__ import annotations

import json
import os
import signal

import pytest

from engine_svc.features.structured_output import llguidance_text
from engine_svc.features.structured_output.backends.backend import Vocabulary
from engine_svc.features.structured_output.backends.llguidance_backend import LLGuidanceBackend
from engine_svc.features.structured_output.check import ConstraintRefused
from engine_svc.features.structured_output.constraint import (
    Constraint,
    ConstraintKind,
)
from engine_svc.features.structured_output.extras import StructuredOutput
from engine_svc.features.structured_output.grammar_worker import GrammarWorker
from tests.engine_svc.features.structured_output.test_backends import EOS, SIZE, TOKENIZER_JSON


def schema(document: object, *backends: str) -> StructuredOutput:
    text = json.dumps(document)
    return StructuredOutput(Constraint(ConstraintKind.JSON_SCHEMA, text), backends or ("llguidance",))


def of_kind(kind: ConstraintKind, text: str) -> StructuredOutput:
    return StructuredOutput(Constraint(kind, text))


@pytest.fixture(scope="module")
def worker():
    vocabulary = Vocabulary(TOKENIZER_JSON, SIZE, (EOS,))
    made = GrammarWorker("llguidance", vocabulary, LLGuidanceBackend(vocabulary).special_ids)
    yield made
    made.close()


def test_a_constraint_comes_back_as_a_grammar_or_is_refused(worker):
    asked = schema({"type": "string"})
    written = worker.check(asked)
    assert (written.backend, written.grammar) == (
        "llguidance",
        llguidance_text.grammar_text(asked.constraint, {}),
    )
    with_token = of_kind(ConstraintKind.GRAMMAR, 'start: "a" <[300]>')
    assert worker.check(with_token).grammar == llguidance_text.grammar_text(with_token.constraint, {})
    for refused, words, reason in (
        (of_kind(ConstraintKind.JSON_SCHEMA, "{"), "is not JSON", "CONSTRAINT_INVALID"),
        (schema({"minProperties": 3}), "no backend enforces minProperties at #", "CONSTRAINT_NOT_ENFORCED"),
        (of_kind(ConstraintKind.REGEX, "a{30000}"), "20000 are allowed", "CONSTRAINT_TOO_COMPLEX"),
    ):
        with pytest.raises(ConstraintRefused, match=words) as caught:
            worker.check(refused)
        assert caught.value.reason == reason


def test_a_schema_is_rewritten_for_the_backend_that_enforces_it(worker):
    one_of = {"oneOf": [{"type": "string"}, {"type": "null"}]}
    for backends in (("xgrammar",), ("xgrammar", "llguidance")):
        written = worker.check(schema(one_of, *backends))
        assert (written.backend, written.grammar) == ("xgrammar", "")
        assert "oneOf" not in written.constraint.text
    pattern = {"type": "string", "pattern": "a"}
    assert worker.check(schema(pattern, "xgrammar", "llguidance")).backend == "llguidance"


def test_what_takes_too_long_or_too_much_ends_alone(worker):
    """A grammar that is only written takes a third of the time, and nearly no memory.

    A fast processor meets the most symbols of a grammar before it meets the limit of time.
    """
    objects = [{"properties": {f"p{number}_{index}": {} for index in range(2000)}} for number in range(9)]
    words = r"^json_schema (took .* to compile|needs more than 65524 symbols of a grammar)$"
    with pytest.raises(ConstraintRefused, match=words) as caught:
        worker.check(schema({"prefixItems": objects}))
    assert caught.value.reason == "CONSTRAINT_TOO_COMPLEX"
    assert worker.check(schema({"type": "string"}))


def test_a_process_that_was_killed_is_replaced(worker):
    worker.check(schema({"type": "string"}))
    os.kill(worker._child.pid, signal.SIGKILL)
    worker._child.join(10)
    assert worker.check(schema({"type": "string"}))
