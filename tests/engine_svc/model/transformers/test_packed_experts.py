"""Packed experts compute what transformers' own do, and the same for a token in every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from engine_svc.model.transformers.packing import PackedExperts, SingleExperts, prepack_experts
from triptych_kernels import REFERENCE, ops_for

HIDDEN, FEATURES, NUM_EXPERTS, NUM_CHOSEN = 64, 96, 8, 3
OPS = ops_for(torch.device("cpu"))
DTYPES = [torch.float32, torch.bfloat16]

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
