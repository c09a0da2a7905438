"""The published contract of triptych, one package an area and version; and what scripts use of the product.

`from triptych import LLM, SamplingParams` loads an engine's libraries. The contract needs only protobuf and
gRPC, so these names are loaded when they are used, and by name: this package imports nothing of the product.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triptych_cli.llm import LLM, RequestResult, SamplingParams
    from triptych_cli.offline.params import RepetitionDetection, StructuredOutput

_MODULES = {
    "LLM": "triptych_cli.llm",
    "RequestResult": "triptych_cli.llm",
    "SamplingParams": "triptych_cli.llm",
    "RepetitionDetection": "triptych_cli.offline.params",
    "StructuredOutput": "triptych_cli.offline.params",
    "errors": "triptych_cli.errors",
}

__all__ = ["LLM", "RepetitionDetection", "RequestResult", "SamplingParams", "StructuredOutput", "errors"]
# Names of vLLM.
_CALLED_OTHERWISE = {
    "CompletionOutput": "the type of RequestResult.outputs",
    "GuidedDecodingParams": "StructuredOutput",
    "RequestOutput": "RequestResult",
    "StructuredOutputsParams": "StructuredOutput",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        own = _CALLED_OTHERWISE.get(name)
        hint = f"it is {own} here" if own else f"there are {', '.join(__all__)}"
        raise AttributeError(f"module 'triptych' has no attribute {name!r}: {hint}")
    module = import_module(_MODULES[name])
    return module if name == "errors" else getattr(module, name)
