"""The state space recurrence of Mamba-2 in Triton against the reference."""

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
from triptych_kernels.triton.ssd_scan import ssd_scan

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
TABLES = {"chunked": ssd_scan, "recurrent": functools.partial(ssd_scan, chunked=False)}


@pytest.mark.parametrize("form", list(TABLES))
@pytest.mark.parametrize(("shape", "dtype"), cases("ssd_scan", TOLERANCE), ids=str)
def test_ssd_scan_equals_the_reference(shape, dtype, form, device):
    assert_equals_the_reference(TABLES[form], "ssd_scan", shape, dtype, TOLERANCE[dtype], device)


@pytest.mark.parametrize("shape", SHAPES["ssd_scan"][1:4], ids=str)
def test_a_decode_step_equals_the_reference(shape, device):
    assert_decodes_like_the_reference(ssd_scan, "ssd_scan", shape, device)


@pytest.mark.parametrize("form", list(TABLES))
def test_a_row_may_keep_a_state_where_it_began(form, device):
    assert_keeps_the_read_state(TABLES[form], "ssd_scan", SHAPES["ssd_scan"][1], device)


def test_states_of_another_shape_are_refused(device):
    assert_refuses_other_states(ssd_scan, "ssd_scan", SHAPES["ssd_scan"][1], device)
