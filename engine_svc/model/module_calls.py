"""Which functions of torch a model's modules call, and other ones in their place while a module runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.overrides import TorchFunctionMode


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
