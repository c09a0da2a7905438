"""Packed projections and mixtures as tensors and JSON, and back, so that a file can keep them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from triptych_kernels.cpu.elementwise import GATES, gate_and_mul
from triptych_kernels.cpu.experts import NativeExperts
from triptych_kernels.cpu.linear import NativeLinear, Packed
from triptych_kernels.cpu.loader import Isa
from triptych_kernels.gated_linear import GatedLinear
from triptych_kernels.ops import Experts, Linear, PackedParts

_LINEAR, _EXPERTS = "linear", "experts"
_GATED = {f"{gate} of linear": gate for gate in GATES}  # a projection whose gates are activated behind it
# Of the members of an object of JSON that stands for something else: there is one.
_TENSOR, _DTYPE, _PACKED = "tensor", "dtype", "packed"


def take_apart(isa: Isa, packed: Linear | Experts) -> PackedParts | None:
    """See ops.Ops.  Of what the reference computes there are none."""
    kind, made = _LINEAR, packed
    if isinstance(packed, GatedLinear) and (gate := _gate_of(packed)) is not None:
        kind, made = f"{gate} of linear", packed.gate_up
    elif isinstance(packed, NativeExperts):
        kind = _EXPERTS
    if not isinstance(made, NativeLinear | NativeExperts):
        return None
    tensors: list[Tensor] = []
    content = [kind, _encoded(list(made.arguments.items()), tensors)]
    return PackedParts(content, tuple(tensors))


def put_together(isa: Isa, parts: PackedParts) -> Linear | Experts:
    """See ops.Ops.  Tensors have to be aligned like those that were taken apart."""
    content: Any = parts.content  # Which may be broken.
    try:
        kind, encoded = content
        gate = _GATED.get(kind)
        arguments = dict(_decoded(isa, encoded, parts.tensors))
        if kind == _EXPERTS:
            return NativeExperts(isa, **arguments)
        linear = NativeLinear(isa, **arguments)
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"the parts are of nothing that is packed here: {error}") from error
    if gate is not None:
        return GatedLinear(linear, functools.partial(gate_and_mul, isa, gate))
    if kind != _LINEAR:
        raise ValueError(f"the parts are of {kind!r}")
    return linear


def _gate_of(gated: GatedLinear) -> str | None:
    """None if it is activated by something else than these kernels."""
    activation = gated.activate
    if not isinstance(activation, functools.partial) or activation.func is not gate_and_mul:
        return None
    gate: str = activation.args[1]  # behind the instruction set
    return gate


def _encoded(value: object, tensors: list[Tensor]) -> object:
    """value: made of tensors, dtypes, weights as packed, and what JSON has."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, torch.dtype):
        return {_DTYPE: str(value).removeprefix("torch.")}
    if isinstance(value, Packed):
        members = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return {_PACKED: _encoded(members, tensors)}
    if isinstance(value, list | tuple):
        return [_encoded(each, tensors) for each in value]
    assert value is None or isinstance(value, int | str), f"{value!r} is no part of what is packed"
    return value


def _decoded(isa: Isa, value: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(isa, each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        return tensors[content]
    if kind == _DTYPE:
        return getattr(torch, content)
    layout, *others = _decoded(isa, content, tensors)
    packed = Packed(tuple(layout), *others)
    # Kernels read as many bytes, whatever there is.
    if packed.panels.nbytes != isa.native.packed_bytes(*packed.layout):
        raise ValueError(f"{packed.panels.nbytes} bytes are no panels of {packed.layout}")
    return packed
