"""Products without a projection's module: packed where they are recognised for sure, left alone elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine_svc.model.transformers.batch_invariance import prepack_calls
from engine_svc.model.transformers.packing import PackedProjection
from triptych_kernels import REFERENCE, Ops, ops_for

OPS = ops_for(torch.device("cpu"))

pytestmark = pytest.mark.skipif(
    not OPS.is_batch_invariant, reason="products stay as they are where rows are not kept apart"
)


class Router(nn.Module):
    """Scores of experts in fp32, whatever the dtype of the weights."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 64, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(8), requires_grad=False)

    def forward(self, x):
        return F.linear(x.float(), weight=self.weight.float(), bias=self.bias)


def pack(model: nn.Module, x: torch.Tensor, ops: Ops = OPS) -> int:
    return prepack_calls(model, ops, lambda: model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_row_is_bitwise_the_same_in_every_batch(dtype):
    model = nn.Sequential(Router(dtype))
    x = torch.randn(100, 64).to(dtype)
    expected = model(x)
    assert pack(model, x) == 1
    together = model(x)
    torch.testing.assert_close(together, expected)
    for end in (6, 7, 8, 13, 37, 100):
        assert torch.equal(model(x[5:end]), together[5:end])


@torch.inference_mode()
def test_the_weights_stay_where_they_are():
    model = nn.Sequential(Router())
    weight = model[0].weight
    pack(model, torch.randn(3, 64))
    assert model[0].weight is weight


@torch.inference_mode()
def test_other_modules_compute_as_before_even_after_an_error():
    model, other = nn.Sequential(Router()), Router()
    other.weight.data *= 2
    x = torch.randn(3, 64)
    expected = other(x)
    pack(model, x)
    with pytest.raises(AttributeError):
        model(None)
    assert torch.equal(other(x), expected)


@torch.inference_mode()
def test_a_weight_that_changes_is_left_alone():
    class Scaled(Router):
        def forward(self, x):
            return F.linear(x, self.weight * x.mean())

    assert pack(nn.Sequential(Scaled()), torch.randn(3, 64)) == 0


@torch.inference_mode()
def test_two_weights_of_one_shape_are_left_alone():
    class Twofold(Router):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Parameter(torch.randn(8, 64), requires_grad=False)

        def forward(self, x):
            return F.linear(x, self.weight) + F.linear(x, self.second)

    model, x = nn.Sequential(Twofold()), torch.randn(3, 64)
    expected = model(x)
    assert pack(model, x) == 0
    assert torch.equal(model(x), expected)


@torch.inference_mode()
def test_of_modules_in_one_another_the_inner_one_alone_is_packed():
    class Outer(Router):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Router()
            self.inner.weight.data *= 2

        def forward(self, x):
            return super().forward(x) + self.inner(x)

    model, x = nn.Sequential(Outer()), torch.randn(3, 64)
    expected = model(x)
    assert pack(model, x) == 1
    torch.testing.assert_close(model(x), expected)


@torch.inference_mode()
def test_packed_projections_stay_as_they_are():
    weight = torch.randn(8, 64)
    model = nn.Sequential(PackedProjection(REFERENCE.pack_linear(weight), weight))
    assert pack(model, torch.randn(3, 64)) == 0


@torch.inference_mode()
def test_products_stay_as_they_are_where_rows_are_not_kept_apart():
    assert pack(nn.Sequential(Router()), torch.randn(3, 64), REFERENCE) == 0
