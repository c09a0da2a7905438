"""Triton's interpreter, made to work with the numpy at hand and to compute as a GPU does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def complete_interpreter() -> None:
    """Let numbers be bounds of loops, compute in bf16, and sum a row of a product alike at every place.

    The interpreter keeps a number in an array of one element, whose int() numpy refuses since 2.4. It keeps
    bf16 as 16-bit integers, to which it rounds towards zero, and which it casts and multiplies as integers.
    It multiplies matrices by BLAS, whose order of summation depends on where in the matrix a row is.
    Called again, nothing changes.
    """
    if interpreter._convert_float.__module__ == __name__:
        return
    interpreter._patch_lang_tensor = _with_bounds(interpreter._patch_lang_tensor)
    interpreter._convert_float = _with_bf16(interpreter._convert_float)
    builder = interpreter.InterpreterBuilder
    builder.create_dot = _with_placeless_sums(builder.create_dot)
    builder.cast_impl = _with_bf16_casts(builder.cast_impl)


def _with_bounds(patch: Callable) -> Callable:
    def patch_tensor(tensor: type, scope: interpreter._LangPatchScope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch_tensor


def _with_bf16(convert: Callable) -> Callable:
    def convert_float(numbers, from_type, to_type, rounding):
        if from_type == tl.bfloat16 and to_type == tl.float32:
            return numbers.view(np.uint16).astype(np.uint32) << 16
        if from_type == tl.float32 and to_type == tl.bfloat16:
            return _bf16_bits(numbers)
        return convert(numbers, from_type, to_type, rounding)

    return convert_float


def _bf16_bits(numbers: np.ndarray) -> np.ndarray:
    """The 16 bits of fp32 numbers in bf16: to nearest, ties to even."""
    wide = np.ascontiguousarray(numbers, dtype=np.float32)
    bits = wide.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)


def _with_bf16_casts(cast: Callable) -> Callable:
    def cast_numbers(self, source, to_type):
        if tl.bfloat16 not in (source.dtype.scalar, to_type.scalar):
            return cast(self, source, to_type)
        numbers = _wide(source).data
        if to_type.scalar == tl.bfloat16:
            return interpreter.TensorHandle(_bf16_bits(numbers), tl.bfloat16)
        return interpreter.TensorHandle(
            numbers.astype(interpreter._get_np_dtype(to_type.scalar)), to_type.scalar
        )

    return cast_numbers


def _with_placeless_sums(create_dot: Callable) -> Callable:
    def create_placeless_dot(self, a, b, total, *others):
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return create_dot(self, a, b, total, *others)
        left, right = (_wide(operand).data.astype(total.data.dtype) for operand in (a, b))
        product = np.einsum("...mk,...kn->...mn", left, right)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    return create_placeless_dot


def _wide(operand: interpreter.TensorHandle) -> interpreter.TensorHandle:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    bits = operand.data.astype(np.uint32) << 16
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
