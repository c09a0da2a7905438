"""Every op has its line, at shapes small enough to run here."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.scenarios.kernels import measure_all
from benchmarks.scenarios.kernels.cases import CaseMaker, DecoderShape
from triptych_kernels import REFERENCE, Ops

CPU = torch.device("cpu")
SHAPE = DecoderShape(
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=100,
    num_experts=4,
    num_chosen=2,
    expert_size=8,
    num_state_heads=2,
    state_size=8,
    num_rows=(1, 3),
    context=20,
    prompt=33,
)


def test_every_op_of_the_table_is_measured():
    measured = {case.op.partition(" ")[0] for case in CaseMaker(SHAPE, CPU, torch.float32).all_cases()}
    assert measured == {field.name for field in dataclasses.fields(Ops)} - {
        "name",
        "is_batch_invariant",
        "needs_clean_blocks",
        "reads_common_blocks",
        "activations",
        "look_up",
        "put_together",
        "take_apart",
    }


def test_a_row_has_times_and_ratios():
    rows = list(measure_all(SHAPE, REFERENCE, CPU, torch.float32, num_repeats=1))
    assert len({tuple(row) for row in rows}) == 1
    by_op = {row["op"]: row for row in rows}
    norm = by_op["rms_norm"]
    assert norm["over_torch"] == pytest.approx(norm["torch_us"] / norm["ours_us"])
    # The reference serves no int8, and it is not compared with itself.
    assert by_op["pack_linear int8"]["ours_us"] is None
    assert norm["reference_us"] is None


@torch.inference_mode()
def test_what_torch_is_timed_on_is_the_same_work():
    for case in CaseMaker(SHAPE, CPU, torch.float32).all_cases():
        if case.op in ("pack_linear", "rms_norm", "silu_and_mul", "gelu_tanh_and_mul", "sigmoid_and_mul"):
            torch.testing.assert_close(case.make(REFERENCE)(), case.torch_call(), rtol=1e-4, atol=1e-4)
        if case.op == "paged_attention":
            assert case.make(REFERENCE)().numel() == case.torch_call().numel()
