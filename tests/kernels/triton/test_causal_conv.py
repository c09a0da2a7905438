"""Depthwise convolution over the last tokens of a row in Triton against the reference."""

from __future__ import annotations

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
from triptych_kernels.triton.causal_conv import causal_conv

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
TABLES = {"": causal_conv}


@pytest.mark.parametrize("form", list(TABLES))
@pytest.mark.parametrize(("shape", "dtype"), cases("causal_conv", TOLERANCE), ids=str)
def test_causal_conv_equals_the_reference(shape, dtype, form, device):
    assert_equals_the_reference(TABLES[form], "causal_conv", shape, dtype, TOLERANCE[dtype], device)


@pytest.mark.parametrize("shape", SHAPES["causal_conv"][1:4], ids=str)
def test_a_decode_step_equals_the_reference(shape, device):
    assert_decodes_like_the_reference(causal_conv, "causal_conv", shape, device)


@pytest.mark.parametrize("form", list(TABLES))
def test_a_row_may_keep_a_state_where_it_began(form, device):
    assert_keeps_the_read_state(TABLES[form], "causal_conv", SHAPES["causal_conv"][1], device)


def test_states_of_another_shape_are_refused(device):
    assert_refuses_other_states(causal_conv, "causal_conv", SHAPES["causal_conv"][1], device)
