"""Penalties in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.penalties import penalty_case, without_tokens
from triptych_kernels import REFERENCE
from triptych_kernels.triton.penalties import penalise

# Rows of logits, vocabulary, rows that ask, longest row.
SHAPES = [(1, 1, 1, 1), (3, 63, 2, 129), (5, 129, 5, 63), (4, 9000, 3, 2100)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_penalise_equals_the_reference(shape, device):
    case = penalty_case(*shape, device=device)
    expected = case.logits.clone()
    REFERENCE.penalise(expected, case.token_ids, case.penalised, case.lengths)
    penalise(case.logits, case.token_ids, case.penalised, case.lengths)
    # Where a GPU fuses a product and a sum, one rounding less is made.
    torch.testing.assert_close(case.logits, expected, rtol=1e-6, atol=1e-6)


def test_rows_that_do_not_fit_at_once_are_done_one_after_the_other(device):
    case = penalty_case(5, 63, 5, 40, device=device)
    expected = case.logits.clone()
    REFERENCE.penalise(expected, case.token_ids, case.penalised, case.lengths)
    penalise(case.logits, case.token_ids, case.penalised, case.lengths, max_counts=2 * 63)
    torch.testing.assert_close(case.logits, expected, rtol=1e-6, atol=1e-6)


def test_without_an_engine_that_asks_nothing_changes(device):
    case = penalty_case(2, 63, 0, 9, device=device)
    before = case.logits.clone()
    penalise(case.logits, case.token_ids, case.penalised, case.lengths)
    assert torch.equal(case.logits, before)


def test_logits_in_columns_are_refused(device):
    case = penalty_case(3, 63, 2, 9, device=device)
    with pytest.raises(ValueError, match="columns must be contiguous"):
        penalise(case.logits.t().contiguous().t(), case.token_ids, case.penalised, case.lengths)


def test_positions_of_a_prompt_without_a_token_count_for_nothing(device):
    case = penalty_case(3, 63, 3, 129, device=device)
    without_tokens(case)
    expected = case.logits.clone()
    REFERENCE.penalise(expected, case.token_ids, case.penalised, case.lengths)
    penalise(case.logits, case.token_ids, case.penalised, case.lengths)
    torch.testing.assert_close(case.logits, expected, rtol=1e-6, atol=1e-6)
