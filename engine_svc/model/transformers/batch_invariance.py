"""Which functions of torch a model's modules call, and other ones in their place while a module runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from engine_svc.model.transformers.packing import PackedProjection
from triptych_kernels import Ops


class FunctionCall(NamedTuple):
    """One call of a function of torch."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def result(self) -> Any:
        """What torch computes."""
        return self.function(*self.arguments, **self.options)


# The modules that run, the innermost last, and what is called.
Note = Callable[[Sequence[nn.Module], FunctionCall], None]
# Computes what is called for, in whatever way.
Compute = Callable[[FunctionCall], Any]


def watch_calls(model: nn.Module, run: Callable[[], object], note: Note) -> None:
    """Tell `note` of every call of a function of torch while `run`, a forward of `model`, runs."""
    running: list[nn.Module] = []

    def enter(module: nn.Module, _arguments: object) -> None:
        running.append(module)

    def leave(_module: nn.Module, _arguments: object, _output: object) -> None:
        running.pop()

    def compute(call: FunctionCall) -> Any:
        note(running, call)
        return call.result()

    hooks = [
        hook
        for module in model.modules()
        for hook in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave))
    ]
    with _Mode(compute):
        run()
    for hook in hooks:
        hook.remove()


def compute_by(module: nn.Module, compute: Compute) -> None:
    """From now on `compute` does what functions of torch are called for while `module` runs."""
    mode = _Mode(compute)

    def enter(_module: nn.Module, _arguments: object) -> None:
        mode.__enter__()  # type: ignore[no-untyped-call]

    def leave(_module: nn.Module, _arguments: object, _output: object) -> None:
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


class _Mode(TorchFunctionMode):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self._compute = compute

    def __torch_function__(  # type: ignore[no-untyped-def]
        self, function, types, arguments=(), options=None
    ):
        return self._compute(FunctionCall(function, arguments, options or {}))


_UNEVEN = frozenset(
    {
        F.elu, F.gelu, F.mish, F.sigmoid, F.silu, F.softplus,
        torch.rsqrt, torch.sigmoid, Tensor.rsqrt, Tensor.sigmoid,
    }
)  # fmt: skip
# Elements: a multiple of what any vector of torch's holds, twice.
_WHOLE = 64
# Elements: fewer than torch divides over threads.
_PIECE = 16_384


def even_out(model: nn.Module, ops: Ops, run: Callable[[], object]) -> int:
    """Make the model's modules compute such functions evenly; returns how many modules call one.

    `run` is a forward of `model` of a number of tokens that is no multiple of 64. Where `ops` make no promise
    about batches, all stays as it is; a GPU computes each element alone.
    """
    if not ops.is_batch_invariant or next(model.parameters()).device.type != "cpu":
        return 0
    kinds: set[type[nn.Module]] = set()

    def note(running: Sequence[nn.Module], call: FunctionCall) -> None:
        if running and call.function in _UNEVEN and not _is_even_anyway(call.arguments):
            kinds.add(type(running[-1]))

    watch_calls(model, run, note)
    # Of one kind all: which experts the sample passed is chance.
    found = [module for module in model.modules() if type(module) in kinds]
    for module in found:
        compute_by(module, _compute)
    return len(found)


def _compute(call: FunctionCall) -> Any:
    if call.function not in _UNEVEN or not call.arguments or call.options.get("inplace"):
        return call.result()
    x, *others = call.arguments
    return evenly(lambda piece: call.function(piece, *others, **call.options), x)


def evenly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each element of x, by whole vectors and in one thread. Returns x's shape."""
    flat = x.reshape(-1)
    whole = F.pad(flat, (0, -flat.numel() % _WHOLE))
    pieces = [function(piece) for piece in whole.split(_PIECE)]
    result = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return result[: flat.numel()].view(x.shape)


def _is_even_anyway(arguments: tuple[Any, ...]) -> bool:
    """Whether each row is made of whole vectors, however many there are."""
    x = arguments[0] if arguments else None
    if not isinstance(x, Tensor) or not x.dim():
        return True
    return torch.get_num_threads() == 1 and x.is_contiguous() and x.shape[-1] % _WHOLE == 0


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
