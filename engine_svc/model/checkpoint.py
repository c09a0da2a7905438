"""The files of a checkpoint folder: found, read, fingerprinted. Safetensors only, no pickles."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine_svc.model.errors import CheckpointError

Progress = Callable[[str, int, int], None]  # phase, done, total

_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"
_PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAMPLE_BYTES = 4096


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of the folder, all present: one file, or the shards that the index names."""
    index = folder / _INDEX_NAME
    if index.is_file():
        shards = [folder / name for name in _shard_names(index)]
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {len(missing)} of {len(shards)} weight files: {_some(missing)}"
            )
        return shards
    if (folder / _SINGLE_NAME).is_file():
        return [folder / _SINGLE_NAME]
    pickles = sorted(path.name for pattern in _PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder} has weights only as {_some(pickles)}; files that run code when read are refused: "
            "convert them to safetensors"
        )
    raise CheckpointError(f"{folder} has neither {_SINGLE_NAME} nor {_INDEX_NAME}: no weights to load")


def read_weights(files: list[Path], progress: Progress) -> dict[str, Tensor]:
    """Every tensor of the files, in memory. Progress counts bytes of the phase "weights"."""
    total = sum(path.stat().st_size for path in files)
    weights: dict[str, Tensor] = {}
    done = 0
    progress("weights", 0, total)
    for path in files:
        before = done
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  The file is no mapping.
                    # The file is mapped: the copy is what reads it, here and not in the first forward.
                    weights[name] = file.get_tensor(name).clone()
                    done += weights[name].nbytes
                    progress("weights", done, total)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        done = before + path.stat().st_size
    progress("weights", total, total)
    return weights


def weights_digest(folder: Path, files: list[Path], weights: dict[str, Tensor], dtype: torch.dtype) -> str:
    """A sha256 that tells models apart without reading them twice.

    Over config.json, each file's name, size and header, a sample from the middle of each tensor, the dtype.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            digest.update(file.read(header_bytes))
    for name in sorted(weights):
        flat = weights[name].reshape(-1).view(torch.uint8)
        middle = flat.numel() // 2
        digest.update(flat[middle : middle + _SAMPLE_BYTES].numpy().tobytes())
    digest.update(str(dtype).encode())
    return digest.hexdigest()


def _shard_names(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a weights index: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index} names {name!r}, which is not a safetensors file of its folder")
    if not names:
        raise CheckpointError(f"{index} names no weight files")
    return names


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
