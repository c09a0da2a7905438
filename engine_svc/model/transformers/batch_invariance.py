"""Replaces functions of torch that a transformers model calls by batch-invariant ones.

On a CPU, torch computes the elements of a tensor that fill whole vectors otherwise than the rest, and divides
large tensors over threads, so a row's bits depend on the rows beside it. A sample forward shows which modules
call such functions; while one of these modules runs, the calls are intercepted.
"""

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
        return self.function(*self.arguments, **self.options)


# Called with the running modules, the innermost last, and the call.
Note = Callable[[Sequence[nn.Module], FunctionCall], None]
# Computes the result of a call.
Compute = Callable[[FunctionCall], Any]

_Key = tuple[torch.Size, torch.dtype]

# Elements: twice what the widest vector of torch holds, or a multiple of that.
_VECTOR_MULTIPLE = 64
# Elements: fewer than torch divides over threads.
_MAX_PIECE = 16_384
# Elementwise functions whose vectorized result may differ from that for single elements.
_ELEMENTWISE = frozenset(
    {
        F.elu, F.gelu, F.mish, F.sigmoid, F.silu, F.softplus,
        torch.rsqrt, torch.sigmoid, Tensor.rsqrt, Tensor.sigmoid,
    }
)  # fmt: skip


def make_elementwise_invariant(model: nn.Module, ops: Ops, run: Callable[[], object]) -> int:
    """Make the model's modules compute elementwise functions batch-invariantly; returns how many do.

    `run` is a forward of `model` with a number of tokens that is no multiple of 64. Does nothing if `ops` are
    not batch-invariant, or on a GPU, which computes each element alone.
    """
    if not ops.is_batch_invariant or next(model.parameters()).device.type != "cpu":
        return 0
    kinds: set[type[nn.Module]] = set()

    def note(running: Sequence[nn.Module], call: FunctionCall) -> None:
        if running and call.function in _ELEMENTWISE and not _is_invariant(call.arguments):
            kinds.add(type(running[-1]))

    watch_calls(model, run, note)
    # All modules of a class: which experts the sample reached is chance.
    modules = [module for module in model.modules() if type(module) in kinds]
    for module in modules:
        compute_by(module, _compute_elementwise)
    return len(modules)


def _is_invariant(arguments: tuple[Any, ...]) -> bool:
    """Whether each row fills whole vectors, however many rows there are."""
    x = arguments[0] if arguments else None
    if not isinstance(x, Tensor) or not x.dim():
        return True
    return torch.get_num_threads() == 1 and x.is_contiguous() and x.shape[-1] % _VECTOR_MULTIPLE == 0


def _compute_elementwise(call: FunctionCall) -> Any:
    if call.function not in _ELEMENTWISE or not call.arguments or call.options.get("inplace"):
        return call.result()
    x, *others = call.arguments
    return in_whole_vectors(lambda piece: call.function(piece, *others, **call.options), x)


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`function` of each element of x, in whole vectors and in one thread. Returns x's shape."""
    flat = x.reshape(-1)
    whole = F.pad(flat, (0, -flat.numel() % _VECTOR_MULTIPLE))
    pieces = [function(piece) for piece in whole.split(_MAX_PIECE)]
    result = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return result[: flat.numel()].view(x.shape)


def prepack_calls(model: nn.Module, ops: Ops, run: Callable[[], object]) -> int:
    """Pack the weights that modules pass to F.linear themselves in `run`, a forward of `model`.

    Returns the number of modules. Projections must have been packed before. The weights also stay as they
    are, because other code may read them. Does nothing if `ops` are not batch-invariant.
    """
    if not ops.is_batch_invariant:
        return 0
    products_of = _products_of(model, run)
    for module, products in products_of.items():
        packed = {
            key: PackedProjection(ops.pack_linear(product.weight, product.bias), product.weight)
            for key, product in products.items()
        }
        compute_by(module, _by_packed(packed))
    return len(products_of)


def _products_of(model: nn.Module, run: Callable[[], object]) -> dict[nn.Module, dict[_Key, _Product]]:
    """The products that a module computes in every call, of modules without such calls in submodules."""
    products: dict[nn.Module, list[_Product]] = defaultdict(list)
    outer: set[nn.Module] = set()

    def note(running: Sequence[nn.Module], call: FunctionCall) -> None:
        if call.function is F.linear and running:
            products[running[-1]].append(_read(*call.arguments, **call.options)[1])
            outer.update(running[:-1])

    watch_calls(model, run, note)
    by_key = {module: _by_key(module, made) for module, made in products.items() if module not in outer}
    return {module: made for module, made in by_key.items() if made}


@dataclass(frozen=True, slots=True)
class _Product:
    """A weight [outputs, inputs] that a module multiplied by, and the bias that it added."""

    weight: Tensor
    bias: Tensor | None

    @property
    def key(self) -> _Key:
        """The key of a call's product among those of its module."""
        return self.weight.shape, self.weight.dtype

    def equals(self, other: _Product) -> bool:
        return _are_equal(self.weight, other.weight) and _are_equal(self.bias, other.bias)


def _by_key(module: nn.Module, products: list[_Product]) -> dict[_Key, _Product]:
    """Empty if a weight is none of the module's, or if two products have the same key."""
    by_key: dict[_Key, _Product] = {}
    for product in products:
        known = by_key.setdefault(product.key, product)
        is_own = _is_parameter(module, product.weight) and _is_parameter(module, product.bias)
        if not is_own or not product.equals(known):
            return {}
    return by_key


def _is_parameter(module: nn.Module, tensor: Tensor | None) -> bool:
    """Whether the tensor has the values of one of the module's parameters, in any dtype."""
    if tensor is None:
        return True
    return any(
        _are_equal(parameter.detach().to(tensor.dtype), tensor)
        for parameter in module.parameters()
        if parameter.shape == tensor.shape
    )


def _by_packed(packed: Mapping[_Key, PackedProjection]) -> Compute:
    """Computes F.linear by a packed projection, if there is one for the weight's shape and dtype."""

    def compute(call: FunctionCall) -> Any:
        if call.function is F.linear:
            x, product = _read(*call.arguments, **call.options)
            projection = packed.get(product.key)
            if projection is not None:
                return projection(x)
        return call.result()

    return compute


def _read(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, _Product]:
    """Binds the arguments of F.linear, with its parameter names."""
    return input, _Product(weight, bias)


def _are_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one, other)


def watch_calls(model: nn.Module, run: Callable[[], object], note: Note) -> None:
    """Call `note` for every call of a function of torch while `run`, a forward of `model`, runs."""
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
    """Let `compute` compute the calls of functions of torch while `module` runs, from now on."""
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
