"""Rows with constraints, one mask at a time, and the cache of grammars."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from engine_svc.core.errors import RequestFailed
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest
from engine_svc.features.structured_output.backends.backend import Vocabulary
from engine_svc.features.structured_output.extras import StructuredOutput
from engine_svc.features.structured_output.grammars import Grammars
from engine_svc.features.structured_output.runner import StructuredOutputRows
from engine_svc.runner.feature import HostTokens, LogitRows, RunnerContext
from tests.engine_svc.features.structured_output.engine_rig import EOS, MODEL, ids, regex_spec, schema_spec
from triptych_kernels import REFERENCE

SIZE = 2100
VOCABULARY = Vocabulary((MODEL / "tokenizer.json").read_text(), SIZE, (EOS,))
MARKER = (1900, 1901)


def make_grammars(max_entries: int = 8, max_bytes: int = 1 << 30) -> Grammars:
    return Grammars(VOCABULARY, num_threads=1, max_entries=max_entries, max_bytes=max_bytes)


class Rows:
    """The feature without a model; logits are all 0 before it masks them."""

    def __init__(self) -> None:
        cpu = torch.device("cpu")
        token_ids = torch.zeros(4, 64, dtype=torch.int32)
        model: Any = None
        context = RunnerContext(model, cpu, torch.float32, SIZE, 4, REFERENCE, token_ids, (EOS,))
        self.feature = StructuredOutputRows(make_grammars(), VOCABULARY, context)

    def enter(
        self, row: int, spec: StructuredOutput, output: tuple[int, ...] = (), **options: object
    ) -> None:
        sampling = SamplingParams(**{"max_tokens": 32, "eos_token_id": EOS} | options)
        extras = {StructuredOutput: self.feature.prepare(spec)}
        self.feature.add_row(row, AdmittedRequest(str(row), [5, *output], 1, sampling, [[]], extras))

    def step(self, tokens: dict[int, int], sampling: list[int]) -> dict[int, str]:
        columns = (tokens, tokens.values(), sampling, [0 for _ in sampling], [-1 for _ in sampling])
        arrays = (np.array(list(column), dtype=np.int64) for column in columns)
        return self.feature.on_tokens(HostTokens(*arrays))

    def allowed(self, *rows: int) -> list[set[int]]:
        """What each of these rows of the step may choose; they are in the logits' order."""
        logits = torch.zeros(len(rows), SIZE)
        some = LogitRows(np.arange(len(rows)), np.array(rows))
        positions = np.zeros(len(rows), dtype=np.int64)
        self.feature.apply(logits, some, positions, torch.zeros(4, 64, dtype=torch.int32))
        return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]

    def allowed_after(self, *tokens: int, row: int = 0) -> set[int]:
        for token in tokens:
            assert self.step({row: token}, []) == {}
        assert self.step({}, [row]) == {}
        return self.allowed(row)[0]


def test_125_own_stop_ids_are_allowed_where_the_output_may_end_and_nowhere_else():
    rows = Rows()
    digit, stop, five = ids("4")[0], ids("x")[0], ids("5")[0]
    rows.enter(0, regex_spec("[0-9]{2}"), stop_token_ids=frozenset({stop, five}))
    first = rows.allowed_after()
    assert digit in first
    assert not first & {stop, five, EOS}
    assert rows.allowed_after(digit, digit) == {stop, five, EOS}


def test_ends_are_forbidden_below_min_tokens():
    rows = Rows()
    digit = ids("4")[0]
    rows.enter(0, regex_spec("[0-9]*"), min_tokens=2)
    assert EOS not in rows.allowed_after(digit)
    assert EOS in rows.allowed_after(digit)


def test_stop_ids_that_the_language_needs_end_the_row_with_the_conflict():
    rows = Rows()
    rows.enter(0, regex_spec("[0-9]b"), stop_token_ids=frozenset(ids("b")))
    assert rows.allowed_after()
    (message,) = rows.step({0: ids("4")[0]}, [0]).values()
    assert message == ("the constraint allows stop_token_ids alone, where the output may not end")


def test_124_tokens_after_the_end_of_reasoning_advance_the_grammar():
    a, digits = ids("a")[0], {ids(digit)[0] for digit in "0123456789"}
    spec = regex_spec("[ab][0-9]", reasoning_end=MARKER)
    rows = Rows()
    rows.enter(0, spec)
    assert rows.allowed_after(7, MARKER[0], EOS, MARKER[0]) == set(range(SIZE))
    assert a in rows.allowed_after(MARKER[1])
    assert rows.allowed_after(a) == digits
    # A request that moved, at any token: one that was in the middle of the marker, too.
    tokens = (7, MARKER[0], EOS, *MARKER, a)
    for num_before in range(len(tokens) + 1):
        rows.enter(1, spec, tokens[:num_before])
        assert rows.allowed_after(*tokens[num_before:], row=1) == digits
        rows.feature.remove_row(1)


@pytest.mark.parametrize("marker", [(1900,), (1900, 1901, 1902, 1903)])
def test_124_an_end_of_reasoning_may_have_one_token_or_several(marker: tuple[int, ...]):
    rows = Rows()
    rows.enter(0, regex_spec("[0-9]x", reasoning_end=marker))
    assert EOS in rows.allowed_after(*marker[:-1])
    assert rows.allowed_after(marker[-1]) == {ids(digit)[0] for digit in "0123456789"}


def test_an_output_may_open_reasoning_itself_and_is_held_behind_it_or_from_its_first_token():
    a, think, digits = ids("a")[0], 1899, {ids(digit)[0] for digit in "0123456789"}
    spec = regex_spec("[ab][0-9]", reasoning_end=MARKER, reasoning_start=(think,))
    rows = Rows()
    for row in (0, 1):
        rows.enter(row, spec, min_tokens=2)
        first = rows.allowed_after(row=row)
        assert {a, think} <= first and EOS not in first and 7 not in first
    assert rows.allowed_after(a, row=0) == digits, "no reasoning behind the first token"
    assert rows.allowed_after(think, row=1) == set(range(SIZE))
    assert rows.allowed_after(7, think, a, row=1) == set(range(SIZE))
    assert think not in rows.allowed_after(*MARKER, row=1)
    assert rows.allowed_after(a, row=1) == digits
    # A request that moved, at any token.
    for tokens in ((think, 7, *MARKER, a), (a,)):
        for num_before in range(len(tokens) + 1):
            rows.enter(2, spec, tokens[:num_before])
            assert rows.allowed_after(*tokens[num_before:], row=2) == digits
            rows.feature.remove_row(2)
        assert spec.begin_in(tokens) == (4 if tokens[0] == think else 0)
    assert spec.begin_in((think, 7)) == -1


def test_a_mark_of_reasoning_may_have_several_tokens_and_begin_like_the_language():
    a, digits = ids("a")[0], {ids(digit)[0] for digit in "0123456789"}
    rows = Rows()
    for row, mark in ((0, (1899, 1898)), (1, (a, 1898, 1897))):
        spec = regex_spec("[ab][0-9]", reasoning_end=MARKER, reasoning_start=mark)
        rows.enter(row, spec)
        assert {a, mark[0]} <= rows.allowed_after(row=row)
        assert rows.allowed_after(mark[0], row=row) == ({1898} | (digits if row else set()))
        if row:
            assert rows.allowed_after(1898, row=row) == {1897}
        assert rows.allowed_after(mark[-1], row=row) == set(range(SIZE))
        assert rows.allowed_after(*MARKER, a, row=row) == digits
        for num_before in range(len(mark)):
            rows.enter(2, spec, mark[:num_before])
            assert rows.allowed_after(*mark[num_before:], *MARKER, a, row=2) == digits
            rows.feature.remove_row(2)
    rows.enter(2, spec)
    assert EOS in rows.allowed_after(a, ids("4")[0], row=2), "as if there were no mark"


def test_29_a_row_that_cannot_advance_ends_and_others_go_on():
    rows = Rows()
    a, b = ids("a")[0], ids("b")[0]
    rows.enter(0, regex_spec("ab"))
    rows.enter(2, regex_spec("ab"))
    failed = rows.step({0: b, 2: a}, [0, 2])
    assert failed == {
        0: f"structured_output: the constraint does not allow token {b} at position 0 of the output"
    }
    rows.feature.remove_row(0)
    assert rows.allowed(2) == [{b}]


def test_only_rows_with_a_constraint_that_has_begun_are_masked():
    rows = Rows()
    a = ids("a")[0]
    rows.enter(0, regex_spec("a", reasoning_end=MARKER))
    rows.enter(1, regex_spec("a"))
    rows.enter(3, regex_spec("b"), (*ids("b"), EOS))
    assert rows.step({}, [3, 1, 0]) == {}
    ended, constrained, reasoning = rows.allowed(3, 1, 0)
    assert (constrained, len(ended), len(reasoning)) == ({a}, SIZE, SIZE)


def test_the_example_of_the_warm_up_is_masked():
    rows = Rows()
    rows.enter(0, rows.feature.example())
    assert 0 < len(rows.allowed_after()) < SIZE


def test_grammars_are_kept_within_their_limits():
    grammars = make_grammars(max_entries=2)
    specs = [regex_spec(text) for text in ("a", "b", "c")]
    assert all(grammars.compile(spec).compile_us > 0 for spec in specs)
    assert [grammars.compile(spec).compile_us > 0 for spec in reversed(specs)] == [False, False, True]
    tight = make_grammars(max_bytes=1)
    assert all(tight.compile(specs[0]).compile_us > 0 for _ in range(2))


def test_large_schemas_do_not_wait_for_another_one_that_takes_long():
    grammars = make_grammars()
    # Its time limit of seconds ends it.
    parts = [{"type": "object", "properties": {f"p{index}": {} for index in range(1500)}} for _ in range(20)]
    costly = schema_spec({"type": "array", "prefixItems": parts})
    refused = threading.Event()

    def compile_costly() -> None:
        with pytest.raises(RequestFailed):
            grammars.compile(costly)
        refused.set()

    try:
        threading.Thread(target=compile_costly).start()
        num_compiled = 0
        while not refused.is_set():
            grammars.compile(schema_spec({"enum": [f"{num_compiled} {index}" for index in range(1000)]}))
            num_compiled += 1
    finally:
        grammars.close()
    # One that waited would be the only one.
    assert num_compiled >= 3


@pytest.mark.parametrize(
    ("pattern", "reason", "is_kept"),
    [("(a", "CONSTRAINT_INVALID", True), ("(a{1000}){1000}", "CONSTRAINT_TOO_COMPLEX", False)],
)
def test_28_what_cannot_be_compiled_is_refused_with_its_status(
    pattern: str, reason: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
):
    grammars, compiled = make_grammars(), []
    backend = grammars._backends["llguidance"]
    compile_ = backend.compile

    def counted(*arguments: Any) -> Any:
        compiled.append(arguments)
        return compile_(*arguments)

    monkeypatch.setattr(backend, "compile", counted)
    for _ in range(2):
        with pytest.raises(RequestFailed) as caught:
            grammars.compile(regex_spec(pattern))
        failure = caught.value
        assert (failure.code, failure.reason) == ("INVALID_ARGUMENT", reason)
        assert failure.field == "sampling.structured_output"
    assert len(compiled) == (1 if is_kept else 2)
