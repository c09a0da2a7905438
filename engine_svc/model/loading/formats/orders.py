"""Checks the groups of columns before a start: the one content of a file that has to fit another tensor."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.folder import Header, weight_files

# Endings of a group of each column, and of scales, with the dimension that counts groups.
_ENDINGS = ((".weight_g_idx", ".weight_scale", 1), (".g_idx", ".scales", 0))
_KINDS = {"I32": "i", "I64": "q"}


def check_orders(folder: Path, headers: Sequence[Header]) -> None:
    """Raise CheckpointError for a group that a weight does not have.  headers: of sound quantized weights."""
    shapes = {entry.name: entry.shape for header in headers for entry in header.entries}
    for path, header in zip(weight_files(folder), headers, strict=True):
        for entry in header.entries:
            num_groups = _num_groups(entry.name, shapes)
            if num_groups is None:
                continue
            with path.open("rb") as file:
                file.seek(header.data_offset + entry.start)
                groups = array(_KINDS[entry.dtype], file.read(entry.end - entry.start))
            first, last = min(groups), max(groups)
            # All -1: without an order.
            if (first < 0 or last >= num_groups) and (first, last) != (-1, -1):
                wrong = first if first < 0 else last
                raise CheckpointError(f"{folder}: {entry.name} has group {wrong}, there are {num_groups}")


def _num_groups(name: str, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """None for another tensor than one of groups."""
    for ending, scales, dimension in _ENDINGS:
        if name.endswith(ending):
            return shapes[name.removesuffix(ending) + scales][dimension]
    return None
