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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'triptych' has no attribute {name!r}")
    module = import_module(_MODULES[name])
    return module if name == "errors" else getattr(module, name)
