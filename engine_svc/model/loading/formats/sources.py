"""The list of formats, and the weights that a folder has in one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_svc.model.errors import CheckpointError, ModelError, UnsupportedModel
from engine_svc.model.loading.folder import HeaderEntry, text_config
from engine_svc.model.loading.formats.awq import AWQ
from engine_svc.model.loading.formats.compressed_tensors import COMPRESSED_TENSORS
from engine_svc.model.loading.formats.fp8 import FP8
from engine_svc.model.loading.formats.gptq import GPTQ
from engine_svc.model.loading.formats.mxfp4 import MXFP4
from engine_svc.model.loading.formats.stored import Section, Stored

if TYPE_CHECKING:
    from engine_svc.model.loading.weights import WeightSource

FORMATS = (COMPRESSED_TENSORS, GPTQ, AWQ, FP8, MXFP4)

# The second is a former name, the third that of MLX.
_SECTIONS = ("quantization_config", "compression_config", "quantization")
# Ends of the names of tensors that only quantized weights have, and the formats that have them.
_ENDINGS = {
    ".qweight": "gptq or awq",
    ".qzeros": "gptq or awq",
    ".g_idx": "gptq",
    ".weight_packed": "compressed-tensors",
    ".weight_g_idx": "compressed-tensors",
    ".weight_zero_point": "compressed-tensors",
    ".weight_scale": "fp8 or compressed-tensors",
    ".weight_scale_inv": "fp8",
    ".weight.absmax": "bitsandbytes",
    "_proj_blocks": "mxfp4",
    "_proj_scales": "mxfp4",
}
_NARROW_DTYPES = frozenset({"F8_E4M3", "F8_E5M2"})
_INTEGER_DTYPES = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})


def weight_sources(
    folder: Path, content: Mapping[str, Any], entries: Iterable[HeaderEntry]
) -> dict[str, WeightSource]:
    """The quantized weights of a folder by name; empty for one that has none.

    content: of its config.json.  entries: of the headers of its files; of equal names the last one counts.
    Raises UnsupportedModel, with the name, for methods and variants that are not read, CheckpointError for
    tensors that do not fit each other or what config.json states.
    """
    stored = {entry.name: entry for entry in entries}
    try:
        return _weight_sources(content, stored)
    except ModelError as error:
        raise type(error)(f"{folder}: {error}") from None


def quantization_method(content: Mapping[str, Any]) -> str | None:
    """The method that config.json states; None for weights in full."""
    section = _section(content)
    if section is None:
        return None
    names = [section.get(key) for key in ("quant_method", "quant_algo")]
    return next((str(name) for name in names if name), "a method that config.json does not name")


def _weight_sources(content: Mapping[str, Any], stored: Stored) -> dict[str, WeightSource]:
    method, section = quantization_method(content), _section(content)
    sources: dict[str, WeightSource] = {}
    if method is not None and section is not None:
        chosen = next((each for each in FORMATS if method in each.methods), None)
        if chosen is None:
            raise UnsupportedModel(f"weights quantized with {method} are not read; {_served()}")
        sources = chosen.sources(section, stored)
    parts = {part for source in sources.values() for part in source.tensors}
    for name, entry in stored.items():
        if name not in parts:
            _check_plain(name, entry.dtype, method)
    # A config without groups states how the KV cache is quantized, which is not applied.
    if method is not None and not sources and (section or {}).get("config_groups") != {}:
        raise CheckpointError(f"config.json states {method}, and no weight is stored so")
    return sources


def _check_plain(name: str, dtype: str, method: str | None) -> None:
    """Raise CheckpointError for a tensor of a quantized weight that none of the sources has."""
    kind = next((kind for end, kind in _ENDINGS.items() if name.endswith(end)), None)
    is_narrow = dtype in _NARROW_DTYPES or (name.endswith(".weight") and dtype in _INTEGER_DTYPES)
    if kind is None and not is_narrow:
        return
    what = f"{name} is of {kind}" if kind else f"{name} has dtype {dtype}"
    if method is None:
        raise CheckpointError(f"{what}, and config.json has no quantization_config that says how to read it")
    raise CheckpointError(f"{what}, and belongs to no weight quantized with {method}")


def _served() -> str:
    return f"quantized weights are read as {', '.join(each.served for each in FORMATS)}"


def _section(content: Mapping[str, Any]) -> Section | None:
    part = text_config(content)
    stated = next((part[key] for key in _SECTIONS if part.get(key) is not None), None)
    return stated if stated is None or isinstance(stated, Mapping) else {}
