"""Functions whose last bits depend on where in a tensor an element is, made to depend on the element alone.

Torch computes them by vectors, what is left at the end of a row or of a thread's part by another formula, and
some in a third way where a tensor has gaps. Here they get whole vectors alone, in one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine_svc.model.module_calls import FunctionCall, compute_by, watch_calls
from triptych_kernels import Ops

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
