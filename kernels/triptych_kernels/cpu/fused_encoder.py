"""What an encoder's layers compute between two layers' attention, each time as one program of native kernels.

A few rows at a time, so that what one kernel writes is still in the caches when the next reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from triptych_kernels.cpu.linear import NativeLinear
from triptych_kernels.cpu.loader import Isa, native_module
from triptych_kernels.cpu.program import Program
from triptych_kernels.ops import EncoderLayer, FusedEncoder, LayerNorm, Linear

_DTYPES = (torch.bfloat16, torch.float32)
_VECTOR = 16  # numbers; the kernel of the norms takes whole ones
_REGISTERS = ("x", "attended", "qkv", "projected", "wide", "num_tokens", "rows_at_once")


def fuse_encoder(isa: Isa, layers: Iterable[EncoderLayer]) -> FusedEncoder | None:
    """See ops.Ops.fuse_encoder.  isa: the instruction set of the kernels."""
    layers = tuple(layers)
    if len({(layer.out.in_features, layer.out.out_features) for layer in layers}) != 1:
        return None
    for dtype in _DTYPES:
        if all(_is_served(layer, dtype) for layer in layers):
            return _NativeEncoder(isa, layers, dtype)
    return None


def _is_served(layer: EncoderLayer, dtype: torch.dtype) -> bool:
    """dtype: of the rows."""
    hidden, width = layer.out.out_features, layer.up.out_features
    linears = (
        (layer.qkv, hidden, 3 * layer.out.in_features),
        (layer.up, hidden, width),
        (layer.down, width, hidden),
    )
    norms = (layer.attention_norm, layer.output_norm)
    return (
        hidden % _VECTOR == 0
        and all(
            tensor.dtype is dtype and tensor.is_contiguous() and tensor.shape == (hidden,)
            for norm in norms
            for tensor in (norm.weight, norm.bias)
        )
        and all(
            (linear.in_features, linear.out_features) == (num_inputs, num_outputs)
            for linear, num_inputs, num_outputs in linears
        )
        and all(
            isinstance(linear, NativeLinear) and linear.keeps(dtype)
            for linear in (layer.qkv, layer.out, layer.up, layer.down)
        )
    )


class _NativeEncoder:
    """See ops.FusedEncoder."""

    def __init__(self, isa: Isa, layers: tuple[EncoderLayer, ...], dtype: torch.dtype) -> None:
        self._layers, self._dtype = layers, dtype
        self._hidden = layers[0].out.out_features
        self._width = max(layer.up.out_features for layer in layers)
        linears = [each for layer in layers for each in (layer.qkv, layer.out, layer.up, layer.down)]
        self._most_at_once = min(_native(linear).rows_at_once for linear in linears)
        self._programs = [
            self._made(isa, previous, following)
            for previous, following in zip((None, *layers), (*layers, None), strict=True)
        ]

    def __call__(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """See ops.FusedEncoder."""
        num_tokens = x.shape[0]
        if x.shape[1] != self._hidden or x.dtype is not self._dtype or not x.is_contiguous() or not x.is_cpu:
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)}: expected {self._dtype} [T, {self._hidden}], contiguous"
            )
        # Each thread adds to what the caches hold.
        at_once = min(num_tokens, self._most_at_once * native_module().num_threads())
        projected = x.new_empty(at_once, self._hidden)
        wide = x.new_empty(at_once, self._width)
        first, *others = self._programs
        numbers = projected.data_ptr(), wide.data_ptr(), num_tokens, at_once
        qkv = x.new_empty(num_tokens, self._layers[0].qkv.out_features)
        first.run(x.data_ptr(), 0, qkv.data_ptr(), *numbers)
        for layer, program in zip(self._layers, others, strict=True):
            attended = attend(qkv)
            wanted = num_tokens, layer.out.in_features
            if attended.shape != wanted or attended.dtype is not x.dtype or not attended.is_contiguous():
                raise ValueError(
                    f"attention gave {attended.dtype} {tuple(attended.shape)}: expected {x.dtype} {wanted}, "
                    "contiguous"
                )
            program.run(x.data_ptr(), attended.data_ptr(), qkv.data_ptr(), *numbers)
        return x

    def _made(self, isa: Isa, layer: EncoderLayer | None, following: EncoderLayer | None) -> Program:
        """From the attention of `layer` to that of the following one; None: there is none."""
        program = Program(isa, _REGISTERS)
        named, num_bytes, is_bf16 = program.register, self._dtype.itemsize, self._dtype is torch.bfloat16
        count, projected, wide = named("num_tokens"), named("projected"), named("wide")
        x = named("x").by_row(self._hidden * num_bytes)

        def project(linear: Linear, rows: object, out: object) -> None:
            program.add("linear", _native(linear).plan, rows, linear.in_features, out, count, 0)

        def add_norm(norm: LayerNorm) -> None:
            program.add(
                "add_layer_norm", projected, x, norm.weight.data_ptr(), norm.bias.data_ptr(), count,
                self._hidden, is_bf16, not is_bf16, norm.eps,
            )  # fmt: skip

        with program.over_rows(count, named("rows_at_once")):
            if layer is not None:
                project(layer.out, named("attended").by_row(layer.out.in_features * num_bytes), projected)
                add_norm(layer.attention_norm)
                project(layer.up, x, wide)
                program.add("gelu_rows", wide, count, layer.up.out_features, is_bf16)
                project(layer.down, wide, projected)
                add_norm(layer.output_norm)
            if following is not None:
                project(following.qkv, x, named("qkv").by_row(following.qkv.out_features * num_bytes))
        program.finish()
        return program


def _native(linear: Linear) -> NativeLinear:
    assert isinstance(linear, NativeLinear), "fuse_encoder accepts only these"
    return linear
