"""Writes the static types that follow from the contract: parameters of `LLM`, options of the client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from triptych.common.v1 import sampling_pb2
from triptych_cli.offline.params import plain_params
from triptych_kit.plain_fields import plain_fields

_PARAMS = """# Written by `make protos`.
from collections.abc import Sequence
from dataclasses import dataclass

@dataclass(frozen=True, slots=True, kw_only=True)
class PlainParams:
"""
_OPTIONS = '''"""Sampling parameters that Python writes as the contract does. Written by `make protos`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict


class PlainSamplingOptions(TypedDict, total=False):
    """The options whose types are plain."""

'''
# A client may write it as one text, too.
_NOT_PLAIN = "stop"


def params() -> str:
    """The stub of the parameters of `LLM`."""
    return _PARAMS + "".join(
        f"    {name}: {_shown(kind)} = {default!r}\n" for name, kind, default in plain_params()
    )


def options() -> str:
    """The module of the client's options."""
    kinds = plain_fields(sampling_pb2.SamplingParams)
    return _OPTIONS + "".join(
        f"    {name}: {_shown(kind)}\n" for name, kind in kinds.items() if name != _NOT_PLAIN
    )


def _shown(kind: object) -> str:
    shown = kind.__name__ if type(kind) is type else str(kind)
    return shown.removeprefix("collections.abc.").replace("list[", "Sequence[")


FILES: Mapping[Path, Callable[[], str]] = {
    Path("triptych_cli/offline/plain_params.pyi"): params,
    Path("triptych_client/plain_options.py"): options,
}


if __name__ == "__main__":
    for path, text in FILES.items():
        path.write_text(text(), encoding="utf-8")
