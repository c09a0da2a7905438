"""The process that compiles constraints first: its limits, and that it goes on for others."""

from __future__ import annotations

import json
import os
import signal

import pytest

from engine_svc.features.structured_output.backends.backend import Vocabulary
from engine_svc.features.structured_output.backends.llguidance_backend import marker_ids
from engine_svc.features.structured_output.grammar_worker import GrammarWorker
from tests.engine_svc.features.structured_output.test_backends import EOS, SIZE, TOKENIZER_JSON
from triptych_kit.grammars import llguidance_text
from triptych_kit.grammars.constraint import Constraint, ConstraintKind, GrammarError, GrammarTooComplex


def schema(document: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(document))


@pytest.fixture(scope="module")
def worker():
    vocabulary = Vocabulary(TOKENIZER_JSON, SIZE, (EOS,))
    made = GrammarWorker("llguidance", vocabulary, marker_ids(TOKENIZER_JSON))
    yield made
    made._kill()


def test_a_constraint_comes_back_as_a_grammar_or_is_refused(worker):
    asked = schema({"type": "string"})
    assert worker.check(asked) == llguidance_text.grammar_text(asked, {})
    with_token = Constraint(ConstraintKind.GRAMMAR, 'start: "a" <[300]>')
    assert worker.check(with_token) == llguidance_text.grammar_text(with_token, {})
    with pytest.raises(GrammarError, match="json_schema is not JSON"):
        worker.check(Constraint(ConstraintKind.JSON_SCHEMA, "{"))
    with pytest.raises(GrammarTooComplex, match="20000 are allowed"):
        worker.check(Constraint(ConstraintKind.REGEX, "a{30000}"))


def test_what_takes_too_long_or_too_much_ends_alone(worker):
    """A grammar that is only written takes a third of the time, and nearly no memory."""
    objects = [{"properties": {f"p{number}_{index}": {} for index in range(1500)}} for number in range(20)]
    with pytest.raises(GrammarTooComplex, match=r"json_schema took .* to compile"):
        worker.check(schema({"prefixItems": objects}))
    assert worker.check(schema({"type": "string"}))


def test_a_process_that_was_killed_is_replaced(worker):
    worker.check(schema({"type": "string"}))
    os.kill(worker._child.pid, signal.SIGKILL)
    worker._child.join(10)
    assert worker.check(schema({"type": "string"}))
