"""Packed projections compute what plain ones do, and the same for a row in every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GptOssConfig, Llama4TextConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.pytorch_utils import Conv1D

from engine_svc.model.transformers.batch_invariance import prepack_calls
from engine_svc.model.transformers.packing import (
    PackedExperts,
    PackedProjection,
    ScaledTokensExperts,
    SingleExperts,
    prepack_experts,
    prepack_projections,
)
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


# Products without a projection's module: packed where they are recognised for sure, left alone elsewhere.

OPS = ops_for(torch.device("cpu"))

needs_rows_apart = pytest.mark.skipif(
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


def pack_calls(model: nn.Module, x: torch.Tensor, ops: Ops = OPS) -> int:
    return prepack_calls(model, ops, lambda: model(x))


@needs_rows_apart
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_a_row_of_a_product_is_bitwise_the_same_in_every_batch(dtype):
    model = nn.Sequential(Router(dtype))
    x = torch.randn(100, 64).to(dtype)
    expected = model(x)
    assert pack_calls(model, x) == 1
    together = model(x)
    torch.testing.assert_close(together, expected)
    for end in (6, 7, 8, 13, 37, 100):
        assert torch.equal(model(x[5:end]), together[5:end])


@needs_rows_apart
@torch.inference_mode()
def test_the_weights_stay_where_they_are():
    model = nn.Sequential(Router())
    weight = model[0].weight
    pack_calls(model, torch.randn(3, 64))
    assert model[0].weight is weight


@needs_rows_apart
@torch.inference_mode()
def test_other_modules_compute_as_before_even_after_an_error():
    model, other = nn.Sequential(Router()), Router()
    other.weight.data *= 2
    x = torch.randn(3, 64)
    expected = other(x)
    pack_calls(model, x)
    with pytest.raises(AttributeError):
        model(None)
    assert torch.equal(other(x), expected)


@needs_rows_apart
@torch.inference_mode()
def test_a_weight_that_changes_is_left_alone():
    class Scaled(Router):
        def forward(self, x):
            return F.linear(x, self.weight * x.mean())

    assert pack_calls(nn.Sequential(Scaled()), torch.randn(3, 64)) == 0


@needs_rows_apart
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
    assert pack_calls(model, x) == 0
    assert torch.equal(model(x), expected)


@needs_rows_apart
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
    assert pack_calls(model, x) == 1
    torch.testing.assert_close(model(x), expected)


@needs_rows_apart
@torch.inference_mode()
def test_packed_projections_stay_as_they_are():
    weight = torch.randn(8, 64)
    model = nn.Sequential(PackedProjection(REFERENCE.pack_linear(weight), weight))
    assert pack_calls(model, torch.randn(3, 64)) == 0


@needs_rows_apart
@torch.inference_mode()
def test_products_stay_as_they_are_where_rows_are_not_kept_apart():
    assert pack_calls(nn.Sequential(Router()), torch.randn(3, 64), REFERENCE) == 0


# Packed experts compute what transformers' own do, and the same for a token in every batch.

HIDDEN, FEATURES, NUM_EXPERTS, NUM_CHOSEN = 64, 96, 8, 3
needs_native_kernels = pytest.mark.skipif(
    not OPS.is_batch_invariant, reason="experts stay as they are where rows are not kept apart"
)


class Block(nn.Module):
    """What has experts, as in a model."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x, expert_ids, weights):
        return self.experts(x, expert_ids, weights)


def mixtral(activation: str = "silu") -> nn.Module:
    return MixtralExperts(
        MixtralConfig(
            hidden_size=HIDDEN, intermediate_size=FEATURES, num_local_experts=NUM_EXPERTS,
            hidden_act=activation,
        )
    )  # fmt: skip


def gpt_oss() -> nn.Module:
    return GptOssExperts(
        GptOssConfig(hidden_size=HIDDEN, intermediate_size=FEATURES, num_local_experts=NUM_EXPERTS)
    )


def nemotron() -> nn.Module:
    return NemotronHExperts(
        NemotronHConfig(
            hidden_size=HIDDEN, moe_intermediate_size=FEATURES, n_routed_experts=NUM_EXPERTS,
        )
    )  # fmt: skip


KINDS = {
    "mixtral": (mixtral, PackedExperts),
    "mixtral with gelu": (lambda: mixtral("gelu_pytorch_tanh"), SingleExperts),
    "gpt_oss": (gpt_oss, SingleExperts),
    "nemotron": (nemotron, SingleExperts),
}


def block_of(kind: str, dtype: torch.dtype = torch.float32) -> Block:
    torch.manual_seed(0)
    experts: Any = KINDS[kind][0]()
    experts.config._experts_implementation = "eager"
    for parameter in experts.parameters():
        parameter.data.normal_(0.0, 0.1)
    return Block(experts).to(dtype).requires_grad_(False)


def tokens(num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, ids = torch.rand(num_tokens, NUM_EXPERTS).topk(NUM_CHOSEN)
    return torch.randn(num_tokens, HIDDEN).to(dtype), ids, weights.to(dtype)


@needs_native_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 31])
@torch.inference_mode()
def test_the_sum_is_that_of_transformers(kind, dtype, num_tokens):
    block = block_of(kind, dtype)
    arguments = tokens(num_tokens, dtype)
    expected = block(*arguments)
    assert prepack_experts(block, OPS) == 1
    assert type(block.experts) is KINDS[kind][1]
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(block(*arguments), expected, rtol=tolerance, atol=tolerance)


@needs_native_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_token_is_bitwise_the_same_in_every_batch(kind, dtype):
    block = block_of(kind, dtype)
    prepack_experts(block, OPS)
    x, ids, weights = tokens(100, dtype)
    together = block(x, ids, weights)
    for end in (6, 7, 8, 13, 37, 100):
        assert torch.equal(block(x[5:end], ids[5:end], weights[5:end]), together[5:end])


@needs_native_kernels
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_ids_of_no_expert_add_nothing(kind):
    block = block_of(kind)
    prepack_experts(block, OPS)
    x, ids, weights = tokens(4, torch.float32)
    ids[1] = NUM_EXPERTS
    assert torch.equal(block(x, ids, weights)[1], torch.zeros(HIDDEN))


@needs_native_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_kept_once(kind):
    block = block_of(kind)
    prepack_experts(block, OPS)
    assert not list(block.parameters())


def test_experts_stay_as_they_are_where_rows_are_not_kept_apart():
    block = block_of("mixtral")
    assert prepack_experts(block, REFERENCE) == 0
    assert type(block.experts) is MixtralExperts


@needs_native_kernels
def test_experts_with_a_norm_behind_them_are_left_alone():
    block = block_of("mixtral")
    block.experts.post_expert_norm = nn.LayerNorm(HIDDEN)
    assert prepack_experts(block, OPS) == 0


@needs_native_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_experts_of_scaled_tokens_are_those_of_transformers_and_the_same_in_every_batch(dtype):
    torch.manual_seed(0)
    block: Any = Llama4TextMoe(
        Llama4TextConfig(
            hidden_size=HIDDEN, intermediate_size=FEATURES, num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=NUM_CHOSEN, num_hidden_layers=1,
        )
    )  # fmt: skip
    for parameter in block.parameters():
        parameter.data.normal_(0.0, 0.1)
    experts = block.to(dtype).requires_grad_(False).experts
    x, ids, weights = tokens(31, dtype)
    scales = torch.zeros(31, NUM_EXPERTS, dtype=dtype).scatter_(1, ids, weights)
    scaled = scales.t()[..., None] * x
    expected = experts(scaled.reshape(-1, HIDDEN))
    assert prepack_experts(block, OPS) == 1
    assert type(block.experts) is ScaledTokensExperts
    together = block.experts(scaled.reshape(-1, HIDDEN))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(together, expected, rtol=tolerance, atol=tolerance)
    for end in (6, 7, 31):
        some = block.experts(scaled[:, 5:end].reshape(-1, HIDDEN))
        assert torch.equal(
            some.view(NUM_EXPERTS, -1, HIDDEN), together.view(NUM_EXPERTS, 31, HIDDEN)[:, 5:end]
        )
    assert not list(experts.parameters())
