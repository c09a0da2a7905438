"""Packed projections compute what plain ones do, and the same for a row in every batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine_svc.model.transformers.packing import PackedProjection, prepack_projections
from triptych_kernels import REFERENCE, Ops, ops_for

TABLES = [REFERENCE, ops_for(torch.device("cpu"))]
DTYPES = [torch.float32, torch.bfloat16]


def pack(model: nn.Module, ops: Ops, x: torch.Tensor) -> int:
    return prepack_projections(model, ops, lambda: model(x))


@pytest.mark.parametrize("ops", TABLES, ids=lambda ops: ops.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (63, 129), (320, 864)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 31])
@torch.inference_mode()
def test_the_product_is_that_of_the_plain_projection(ops, dtype, shape, num_rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*shape, dtype=dtype))
    x = torch.randn(1, num_rows, shape[0]).to(dtype)
    expected = model(x)
    assert pack(model, ops, x) == 1
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(model(x), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_row_is_bitwise_the_same_in_every_batch(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(320, 864, bias=False, dtype=dtype))
    x = torch.randn(200, 320).to(dtype)
    pack(model, ops_for(torch.device("cpu")), x)
    together = model(x)
    for num_rows in (1, 2, 3, 7, 8, 31, 64):
        assert torch.equal(model(x[5 : 5 + num_rows]), together[5 : 5 + num_rows])


@pytest.mark.parametrize("ops", TABLES, ids=lambda ops: ops.name)
@torch.inference_mode()
def test_rows_that_lie_across_are_taken_as_they_come(ops):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8))
    across = torch.randn(16, 5).t()
    expected = model(across)
    pack(model, ops, across)
    torch.testing.assert_close(model(across), expected)


@torch.inference_mode()
def test_only_plain_projections_are_replaced():
    torch.manual_seed(0)

    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Conv1D(12, 8), Doubling(12, 4), nn.LayerNorm(4))
    x = torch.randn(3, 8)
    expected = model(x)
    assert pack(model, REFERENCE, x) == 2
    assert [type(part) for part in model[:3]] == [PackedProjection, PackedProjection, Doubling]
    torch.testing.assert_close(model(x), expected)


@torch.inference_mode()
def test_a_projection_whose_weight_is_used_without_a_call_is_left_alone():
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(8, 4, bias=False)

        def forward(self, x):
            return F.linear(x, self.scores.weight)

    model = nn.Sequential(nn.Linear(8, 8), Router())
    x = torch.randn(3, 8)
    expected = model(x)
    assert pack(model, REFERENCE, x) == 1
    torch.testing.assert_close(model(x), expected)


@torch.inference_mode()
def test_a_projection_in_two_places_is_packed_once():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared))
    assert pack(model, REFERENCE, torch.randn(3, 8)) == 1
    assert model[0] is model[1][1]
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
