"""An encoder's layers as one op: what torch's modules compute, the same for any rows beside, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from triptych_kernels import REFERENCE, EncoderLayer, FusedEncoder, LayerNorm, Ops

HIDDEN, INNER, WIDTH, NUM_LAYERS = 48, 36, 104, 2
ALL_TOKENS = 700  # more than are computed at once


class Rig:
    def __init__(self, ops: Ops, dtype: torch.dtype) -> None:
        self.random = torch.Generator().manual_seed(5)
        self.ops, self.dtype = ops, dtype
        self.weights = [self._weights() for _ in range(NUM_LAYERS)]
        self.layers = [self._layer(weights) for weights in self.weights]

    def _layer(self, weights: list[tuple[Tensor, Tensor]]) -> EncoderLayer:
        qkv, out, first, up, down, last = weights
        pack = self.ops.pack_linear
        return EncoderLayer(
            qkv=pack(*qkv),
            out=pack(*out),
            attention_norm=LayerNorm(*first, 1e-5),
            up=pack(*up),
            down=pack(*down),
            output_norm=LayerNorm(*last, 1e-12),
        )

    def some(self, *shape: int) -> Tensor:
        return (torch.randn(*shape, generator=self.random) / shape[-1] ** 0.5).to(self.dtype)

    def _weights(self) -> list[tuple[Tensor, Tensor]]:
        shapes = [
            (3 * INNER, HIDDEN),
            (HIDDEN, INNER),
            (HIDDEN,),
            (WIDTH, HIDDEN),
            (HIDDEN, WIDTH),
            (HIDDEN,),
        ]
        return [(self.some(*shape) * (4 if len(shape) == 1 else 1), self.some(shape[0])) for shape in shapes]

    def expected(self, x: Tensor) -> Tensor:
        """By torch in fp64."""
        x = x.double()
        for weights in self.weights:
            qkv, out, first, up, down, last = ([part.double() for part in pair] for pair in weights)
            x = F.layer_norm(
                x + F.linear(attend(F.linear(x, *qkv)), *out), (HIDDEN,), first[0], first[1], 1e-5
            )
            x = F.layer_norm(
                x + F.linear(F.gelu(F.linear(x, *up)), *down), (HIDDEN,), last[0], last[1], 1e-12
            )
        return x


def attend(qkv: Tensor) -> Tensor:
    """In place of attention: something that needs all three, and no other token."""
    query, key, value = qkv.chunk(3, dim=1)
    return (query * key.tanh() + value).contiguous()


def fused(ops: Ops, rig: Rig) -> FusedEncoder:
    found = ops.fuse_encoder(rig.layers)
    assert found is not None
    return found


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 0.12)])
def test_the_layers_compute_what_torch_does(ops, use_threads, dtype, limit, num_threads):
    use_threads(num_threads)
    rig = Rig(ops, dtype)
    x = rig.some(ALL_TOKENS, HIDDEN) * 20
    x[3] *= 1e-3  # nothing of the residual but what the layers add
    found = fused(ops, rig)(x.clone(), attend)
    assert (found.double() - rig.expected(x)).abs().max() < limit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_whatever_is_computed_beside_it(ops, dtype):
    rig = Rig(ops, dtype)
    x = rig.some(ALL_TOKENS, HIDDEN)
    together = fused(ops, rig)(x.clone(), attend)
    for rows in (slice(0, 1), slice(5, 22), slice(600, 700)):
        assert torch.equal(fused(ops, rig)(x[rows].clone(), attend), together[rows])


def test_gelu_is_torchs_over_all_sizes_of_numbers(ops, isa):
    sizes = torch.logspace(-30, 4, 5_000)
    x = torch.cat([sizes, -sizes, torch.tensor([0.0, torch.inf, torch.nan])])
    expected = F.gelu(x.double())
    isa.native.gelu_rows(x.data_ptr(), 1, len(x), False)
    assert (x.double() - expected).abs().div(expected.abs().clamp(min=1.0)).nan_to_num().max() < 3e-7
    assert x[-3:].tolist()[:2] == [0.0, torch.inf]
    assert x[-1].isnan()


def test_what_the_kernels_do_not_serve_is_left_to_others(ops):
    rig = Rig(ops, torch.float32)
    first = rig.layers[0]
    norm = first.output_norm
    odd = [
        replace(first, output_norm=replace(norm, weight=norm.weight.half())),
        replace(first, attention_norm=replace(norm, bias=norm.bias[:-1])),
        replace(first, up=REFERENCE.pack_linear(rig.some(WIDTH, HIDDEN))),
        replace(first, qkv=ops.pack_linear(rig.some(2 * INNER, HIDDEN))),
        replace(first, down=ops.pack_linear(rig.some(HIDDEN, WIDTH), out_dtype=torch.bfloat16)),
        Rig(ops, torch.bfloat16).layers[0],
    ]
    assert [ops.fuse_encoder([layer, rig.layers[1]]) for layer in odd] == [None] * len(odd)
    assert ops.fuse_encoder([]) is None


def test_rows_that_do_not_fit_are_refused(ops):
    rig = Rig(ops, torch.float32)
    layers = fused(ops, rig)
    with pytest.raises(ValueError, match="x is torch"):
        layers(rig.some(3, HIDDEN - 1), attend)
    with pytest.raises(ValueError, match="attention gave"):
        layers(rig.some(3, HIDDEN), lambda qkv: qkv)
    with pytest.raises(ValueError, match=r"attention gave .*bfloat16"):
        layers(rig.some(3, HIDDEN), lambda qkv: attend(qkv).bfloat16())
