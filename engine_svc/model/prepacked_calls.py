"""Products that modules compute on their own, without a projection's module: routers of mixtures of experts.

While such a module runs, its products are computed by packed projections, so that on a CPU a row's result is
bitwise the same in every batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_svc.model.module_calls import Compute, FunctionCall, compute_by, watch_calls
from engine_svc.model.prepacked import PackedProjection
from triptych_kernels import Ops

_Key = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True, slots=True)
class _Product:
    """A weight [outputs, inputs] as a module multiplied by it, and what it added."""

    weight: Tensor
    bias: Tensor | None

    @property
    def key(self) -> _Key:
        """What a call is recognised by."""
        return self.weight.shape, self.weight.dtype

    def is_that_of(self, other: _Product) -> bool:
        """Whether it is the same product."""
        return _are_equal(self.weight, other.weight) and _are_equal(self.bias, other.bias)


def prepack_calls(model: nn.Module, ops: Ops, run: Callable[[], object]) -> int:
    """Pack what modules multiply by when `run`, a forward of `model`, calls them; returns how many modules.

    Projections are to be packed before. The weights stay where they are too: others may read them.
    Where `ops` make no promise about batches, all stays as it is.
    """
    if not ops.is_batch_invariant:
        return 0
    found = _products_of(model, run)
    for module, products in found.items():
        packed = {
            key: PackedProjection(ops.pack_linear(product.weight, product.bias), product.weight)
            for key, product in products.items()
        }
        compute_by(module, _by_packed(packed))
    return len(found)


def _products_of(model: nn.Module, run: Callable[[], object]) -> dict[nn.Module, dict[_Key, _Product]]:
    """By module, what it and nothing inside it multiplies by in every call."""
    products: dict[nn.Module, list[_Product]] = defaultdict(list)
    outer: set[nn.Module] = set()

    def note(running: Sequence[nn.Module], call: FunctionCall) -> None:
        if call.function is F.linear and running:
            products[running[-1]].append(_read(*call.arguments, **call.options)[1])
            outer.update(running[:-1])

    watch_calls(model, run, note)
    found = {module: _by_key(module, made) for module, made in products.items() if module not in outer}
    return {module: made for module, made in found.items() if made}


def _by_key(module: nn.Module, products: list[_Product]) -> dict[_Key, _Product]:
    """Empty where some weight is none of the module's, or where two cannot be told apart."""
    by_key: dict[_Key, _Product] = {}
    for product in products:
        known = by_key.setdefault(product.key, product)
        is_own = _is_parameter(module, product.weight) and _is_parameter(module, product.bias)
        if not is_own or not product.is_that_of(known):
            return {}
    return by_key


def _is_parameter(module: nn.Module, tensor: Tensor | None) -> bool:
    """Whether it has the values of one, in whatever dtype."""
    if tensor is None:
        return True
    return any(
        _are_equal(parameter.detach().to(tensor.dtype), tensor)
        for parameter in module.parameters()
        if parameter.shape == tensor.shape
    )


def _by_packed(packed: Mapping[_Key, PackedProjection]) -> Compute:
    """Products of plain torch by packed projections, where there is one of the weight's shape and dtype."""

    def compute(call: FunctionCall) -> Any:
        if call.function is F.linear:
            x, product = _read(*call.arguments, **call.options)
            projection = packed.get(product.key)
            if projection is not None:
                return projection(x)
        return call.result()

    return compute


def _read(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, _Product]:
    """The arguments of torch's own function, by its names."""
    return input, _Product(weight, bias)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)
