"""What is a tensor, what is none, and that it comes to torch as it was."""

from __future__ import annotations

import math

import pytest
import torch

from engine_svc.tensors.host_tensor import ITEM_SIZES, BadTensor, HostTensor
from engine_svc.tensors.to_torch import to_torch, torch_dtype


def host_tensor(values: torch.Tensor) -> HostTensor:
    """What a sender makes of a tensor, strided or not."""
    raw = bytes(values.contiguous().reshape(-1).view(torch.uint8).tolist()) if values.numel() else b""
    return HostTensor(str(values.dtype).removeprefix("torch."), tuple(values.shape), raw)


@pytest.mark.parametrize("dtype", ITEM_SIZES)
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (0, 8), (2, 0, 3)], ids=str)
def test_every_type_and_shape_round_trips_bit_by_bit(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    sent = (torch.randint(0, 2, shape, generator=generator) * 3 - 1).to(torch_dtype(dtype))
    came = to_torch(host_tensor(sent))
    assert (came.dtype, came.shape) == (sent.dtype, sent.shape)
    assert torch.equal(came.reshape(-1).view(torch.uint8), sent.reshape(-1).view(torch.uint8))


def test_a_strided_tensor_comes_in_the_order_of_its_indices():
    sent = torch.arange(24.0).reshape(4, 6)[::2, 1::2].t()
    assert not sent.is_contiguous()
    assert torch.equal(to_torch(host_tensor(sent)), sent)


def test_what_is_done_to_a_tensor_leaves_the_message_as_it_came():
    message = host_tensor(torch.ones(3))
    before = message.data
    to_torch(message).fill_(5.0)
    assert message.data == before == host_tensor(torch.ones(3)).data


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "what"),
    [
        ("float32", (2, 2), bytes(15), "16 bytes, 15 came"),
        ("float32", (2, 2), bytes(17), "16 bytes, 17 came"),
        ("float32", (0, 2), bytes(4), "0 bytes, 4 came"),
        ("float32", (2**40, 2**40), b"", f"{2**82} bytes, 0 came"),
        ("bool", (1,) * 9, bytes(1), "9 dimensions"),
        ("complex64", (1,), bytes(8), "dtype is complex64"),
        ("object", (1,), bytes(8), "dtype is object"),
    ],
)
def test_bytes_that_do_not_belong_to_the_form_are_no_tensor(dtype, shape, data, what):
    with pytest.raises(BadTensor, match=what):
        HostTensor(dtype, shape, data)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_element_that_is_no_number_is_found(dtype, bad):
    if dtype == "float8_e4m3fn":
        # It has no infinity.
        bad = math.nan
    values = torch.tensor([0.0, -1.0, 2.0])
    assert host_tensor(values.to(torch_dtype(dtype))).is_sound
    values[1] = bad
    assert not host_tensor(values.to(torch_dtype(dtype))).is_sound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_float16_cannot_hold_is_not_moderate(dtype):
    def values(largest: float) -> HostTensor:
        return host_tensor(torch.tensor([0.0, -largest, 1.0]).to(torch_dtype(dtype)))

    assert values(60_000.0).is_moderate
    for beyond in (70_000.0, 3e38):
        # What is infinite there is another mistake.
        assert values(beyond).is_moderate is (dtype == "float16")


def test_integers_are_sound_and_booleans_are_0_or_1():
    assert HostTensor("int64", (1,), b"\xff" * 8).is_sound
    assert HostTensor("bool", (2,), b"\0\1").is_sound
    assert not HostTensor("bool", (2,), b"\0\2").is_sound
