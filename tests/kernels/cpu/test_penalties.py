"""Native penalties: the reference's to the last bit, and nothing written beside seen tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.penalties import penalty_case
from triptych_kernels import REFERENCE

SHAPES = [(1, 1, 1, 1), (3, 63, 2, 129), (5, 129, 5, 63), (4, 9000, 3, 2100), (2, 63, 0, 9)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_penalties_are_those_of_the_reference(ops, shape):
    case = penalty_case(*shape)
    expected = case.logits.clone()
    REFERENCE.penalise(expected, case.token_ids, case.penalised, case.lengths)
    # The second call finds what the first left of its marks.
    for _ in range(2):
        logits = case.logits.clone()
        ops.penalise(logits, case.token_ids, case.penalised, case.lengths)
        assert torch.equal(logits, expected)
    ops.penalise(case.logits, case.token_ids, case.penalised, case.lengths)
    assert torch.equal(case.logits, expected)


def test_a_seen_nan_stays(ops):
    case = penalty_case(3, 63, 2, 129)
    case.logits.fill_(float("nan"))
    ops.penalise(case.logits, case.token_ids, case.penalised, case.lengths)
    assert case.logits.isnan().all()


def test_ids_outside_of_the_vocabulary_are_passed_over(ops):
    case = penalty_case(3, 63, 2, 9)
    expected = case.logits.clone()
    lengths = case.lengths - 1
    REFERENCE.penalise(expected, case.token_ids, case.penalised, lengths)
    for row, length in zip(case.penalised.rows.tolist(), case.lengths.tolist(), strict=True):
        case.token_ids[row, length - 1] = 63 if length % 2 else -1
    ops.penalise(case.logits, case.token_ids, case.penalised, case.lengths)
    assert torch.equal(case.logits, expected)


@pytest.mark.parametrize("column", ["logit_rows", "rows"])
def test_rows_that_are_not_there_are_refused(ops, column):
    case = penalty_case(3, 63, 2, 9)
    penalised = dataclasses.replace(case.penalised, **{column: torch.tensor([0, 5])})
    with pytest.raises(IndexError, match="row 1 is not within"):
        ops.penalise(case.logits, case.token_ids, penalised, case.lengths)


def test_columns_of_another_length_are_refused(ops):
    case = penalty_case(3, 63, 2, 9)
    with pytest.raises(ValueError, match="2 rows have"):
        ops.penalise(case.logits, case.token_ids, case.penalised, case.lengths[:1])


@pytest.mark.parametrize("column", ["logit_rows", "rows", "num_prompt_tokens", "amounts"])
def test_columns_that_do_not_fit_each_other_are_refused(column):
    penalised = penalty_case(3, 63, 2, 9).penalised
    with pytest.raises(ValueError, match=r"columns|amounts"):
        dataclasses.replace(penalised, **{column: torch.zeros(3)})
