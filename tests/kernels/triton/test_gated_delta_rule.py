"""The gated delta rule in Triton against the reference."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.kernels.state_cases import SHAPES
from tests.kernels.triton.state_checks import (
    assert_decodes_like_the_reference,
    assert_equals_the_reference,
    assert_keeps_the_read_state,
    assert_refuses_other_states,
    cases,
)
from triptych_kernels.triton.gated_delta_rule import gated_delta_rule

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
TABLES = {"chunked": gated_delta_rule, "recurrent": functools.partial(gated_delta_rule, chunked=False)}


@pytest.mark.parametrize("form", list(TABLES))
@pytest.mark.parametrize(("shape", "dtype"), cases("gated_delta_rule", TOLERANCE), ids=str)
def test_gated_delta_rule_equals_the_reference(shape, dtype, form, device):
    assert_equals_the_reference(TABLES[form], "gated_delta_rule", shape, dtype, TOLERANCE[dtype], device)


@pytest.mark.parametrize("shape", SHAPES["gated_delta_rule"][1:4], ids=str)
def test_a_decode_step_equals_the_reference(shape, device):
    assert_decodes_like_the_reference(gated_delta_rule, "gated_delta_rule", shape, device)


@pytest.mark.parametrize("form", list(TABLES))
def test_a_row_may_keep_a_state_where_it_began(form, device):
    assert_keeps_the_read_state(TABLES[form], "gated_delta_rule", SHAPES["gated_delta_rule"][1], device)


def test_states_of_another_shape_are_refused(device):
    assert_refuses_other_states(gated_delta_rule, "gated_delta_rule", SHAPES["gated_delta_rule"][1], device)
