"""Which functions of torch a model's modules call, and other ones in their place while a module runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

# The modules that run, the innermost last; the function, its arguments and its options.
Note = Callable[[Sequence[nn.Module], Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], None]
# Computes the function with these arguments and options, in whatever way.
Compute = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]


def watch_calls(model: nn.Module, run: Callable[[], object], note: Note) -> None:
    """Tell `note` of every call of a function of torch while `run`, a forward of `model`, runs."""
    running: list[nn.Module] = []

    def enter(module: nn.Module, _arguments: object) -> None:
        running.append(module)

    def leave(_module: nn.Module, _arguments: object, _output: object) -> None:
        running.pop()

    def compute(function: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        note(running, function, arguments, options)
        return function(*arguments, **options)

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
        return self._compute(function, arguments, options or {})
