"""What is packed is the same again when it was taken apart and put together."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch

from tests.kernels.cpu.test_experts import KINDS as KINDS_OF_EXPERTS
from tests.kernels.cpu.test_experts import case
from tests.kernels.cpu.test_linear import ALL_KINDS, INT8_ROWS, JOINED, noise, packed
from triptych_kernels import REFERENCE
from triptych_kernels.ops import Experts, Linear, Ops, PackedParts


def again(ops: Ops, made: Linear | Experts) -> Linear | Experts:
    """The same from copies of its parts, by way of JSON."""
    parts = ops.take_apart(made)
    assert parts is not None
    content = json.loads(json.dumps(parts.content))
    return ops.put_together(PackedParts(content, tuple(tensor.clone() for tensor in parts.tensors)))


@pytest.mark.parametrize("gate", [None, "silu", "gelu_tanh"])
@pytest.mark.parametrize(("dtype", "kind"), ALL_KINDS)
def test_a_projection_computes_the_same(ops, dtype, kind, gate):
    pack = ops.pack_linear if gate is None else partial(ops.pack_gated_linear, gate=gate)
    linear = packed(pack, 320, 130, dtype, kind)
    copy = again(ops, linear)
    x = noise(5, 320, dtype=dtype)
    assert torch.equal(copy(x), linear(x))
    assert (copy.num_bytes, copy.in_features, copy.out_features) == (
        linear.num_bytes, linear.in_features, linear.out_features
    )  # fmt: skip


def test_a_head_finds_the_largest_and_rows(ops):
    head = packed(ops.pack_linear, 96, 65, torch.bfloat16, "6-bit" + INT8_ROWS, out_dtype=torch.float32)
    copy = again(ops, head)
    x, kept = noise(3, 96, dtype=torch.bfloat16), torch.tensor([1])
    for ours, theirs in zip(ops.greedy_linear(copy, x, kept), ops.greedy_linear(head, x, kept), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(ops.look_up(copy)(torch.tensor([64, 3])), ops.look_up(head)(torch.tensor([64, 3])))


@pytest.mark.parametrize(("dtype", "kinds"), KINDS_OF_EXPERTS)
def test_experts_compute_the_same(ops, dtype, kinds):
    some = case((8, 256, 96, 2, 3), dtype, num_tokens=9, kinds=kinds)
    experts = some.packed(ops)
    copy = again(ops, experts)
    arguments = some.x, some.ids, some.weights
    assert torch.equal(copy(*arguments), experts(*arguments))
    assert copy.expert_range == experts.expert_range
    assert torch.equal(copy.take(4, 6)(*arguments), experts.take(4, 6)(*arguments))


def test_what_others_compute_has_no_parts(ops):
    assert ops.take_apart(REFERENCE.pack_linear(torch.ones(3, 4))) is None
    assert ops.take_apart(ops.pack_linear(torch.ones(3, 4, dtype=torch.float16))) is None
    with pytest.raises(ValueError, match="not made of parts"):
        REFERENCE.put_together(PackedParts([], ()))


def test_broken_parts_are_refused(ops):
    parts = ops.take_apart(packed(ops.pack_linear, 64, 33, torch.bfloat16, JOINED))
    assert parts is not None
    kind, arguments = parts.content
    shorter = tuple(tensor[:-1] for tensor in parts.tensors)
    for content, tensors in (
        (parts.content, shorter),
        (parts.content, parts.tensors[:1]),
        (["table", arguments], parts.tensors),
        ([kind, arguments[:2]], parts.tensors),
        (None, parts.tensors),
    ):
        with pytest.raises(ValueError, match=r"parts|panels"):
            ops.put_together(PackedParts(content, tensors))
