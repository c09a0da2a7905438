"""Prepacked projections compute what plain ones do, and the same for a row in every batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from engine_svc.model.prepacked import PrepackedLinear, can_prepack, prepack_projections

DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if can_prepack(dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (63, 129), (320, 864)], ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 31])
@torch.inference_mode()
def test_the_product_is_that_of_the_plain_projection(dtype, shape, num_rows):
    torch.manual_seed(0)
    plain = nn.Linear(*shape, dtype=dtype)
    x = torch.randn(1, num_rows, shape[0]).to(dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    packed = PrepackedLinear(plain.weight, plain.bias)
    torch.testing.assert_close(packed(x), plain(x), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_a_row_is_bitwise_the_same_in_every_batch(dtype):
    torch.manual_seed(0)
    packed = PrepackedLinear(torch.randn(864, 320).to(dtype), None)
    x = torch.randn(200, 320).to(dtype)
    together = packed(x)
    for num_rows in (1, 2, 3, 7, 8, 31, 64):
        assert torch.equal(packed(x[5 : 5 + num_rows]), together[5 : 5 + num_rows])


@torch.inference_mode()
def test_only_plain_projections_are_replaced():
    torch.manual_seed(0)

    class Doubling(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Conv1D(12, 8), Doubling(12, 4), nn.LayerNorm(4))
    x = torch.randn(3, 8)
    expected = model(x)
    assert prepack_projections(model) == (2 if DTYPES else 0)
    assert type(model[2]) is Doubling
    torch.testing.assert_close(model(x), expected)
