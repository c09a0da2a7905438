"""A GGUF file as a model folder: what others read beside the weights, written from its metadata once.

The folder is in the user's cache, and has links to the file or its shards. What is in it depends on the name,
size, time of change and header of the file, and on the code that writes it, and so does its own name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.gguf.config import read_config
from engine_svc.model.loading.gguf.file import GgufModel, model_stem, read_model, shard_paths
from engine_svc.model.loading.gguf.names import read_origins
from engine_svc.model.loading.gguf.tokenizer import (
    generation_config,
    read_vocabulary,
    tokenizer_config,
    tokenizer_json,
)
from engine_svc.model.loading.user_cache import user_cache

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
_NAME = "gguf"  # of the folder that has them all


def open_as_folder(path: Path) -> Path:
    """The folder of the model in this file, or whose shards it is one of.

    Raises CheckpointError or UnsupportedModel for files that are damaged or not served, in under a second.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, or is not a file")
    model = read_model([each.absolute() for each in shard_paths(path)])
    config = read_config(model)
    # Whether all tensors are there, in their shapes.
    read_origins(model, config)
    folder = _cache() / f"{model_stem(path)}-{_digest(model)}"
    if not folder.is_dir():
        _write(folder, model, config)
    return folder


def is_from_file(folder: Path) -> bool:
    """Whether `open_as_folder` has made the folder: what it has beside the weights is sound."""
    cache = user_cache()
    return cache is not None and folder.parent == cache / _NAME


def _cache() -> Path:
    cache = user_cache()
    if cache is None:
        raise CheckpointError(
            "there is no home folder for a GGUF file's tokenizer: XDG_CACHE_HOME names another"
        )
    return cache / _NAME


def _digest(model: GgufModel) -> str:
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    for header in model.headers:
        stat = header.path.stat()
        digest.update(f"{header.path} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        digest.update(header.content)
    return digest.hexdigest()[:32]


def _write(folder: Path, model: GgufModel, config: dict[str, Any]) -> None:
    """Write the folder, whole or not at all. Another process that does the same may be first."""
    vocabulary = read_vocabulary(model.metadata, config["vocab_size"])
    contents = {
        name: json.dumps(content, ensure_ascii=False)
        for name, content in (
            ("config.json", config),
            ("tokenizer.json", tokenizer_json(vocabulary)),
            ("tokenizer_config.json", tokenizer_config(vocabulary)),
            ("generation_config.json", generation_config(vocabulary)),
        )
    }
    _check_tokenizer(model.path, contents["tokenizer.json"])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        for name, content in contents.items():
            _write_text(made / name, content)
        for header, name in zip(model.headers, _link_names(len(model.headers)), strict=True):
            (made / name).symlink_to(header.path)
        made.chmod(0o755)
        if not folder.is_dir():
            made.rename(folder)
            logger.info("model folder written", extra={"folder": str(folder), "file": str(model.path)})
    except OSError as error:
        # A folder that another process has written meanwhile is as good.
        if not folder.is_dir():
            raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _check_tokenizer(path: Path, content: str) -> None:
    """Raise CheckpointError for a tokenizer.json that cannot be read: later starts do not look at it."""
    # Imported here: once the folder is there, the library is not needed.
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_str(content)
    except Exception as error:  # The library has no exception class of its own.
        raise CheckpointError(f"{path}: its vocabulary makes no tokenizer: {error}") from error


def _write_text(path: Path, content: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        # The folder's name says that it is whole, after a loss of power, too.
        os.fsync(file.fileno())


def _link_names(number: int) -> list[str]:
    if number == 1:
        return [f"model{SUFFIX}"]
    return [f"model-{index:05d}-of-{number:05d}{SUFFIX}" for index in range(1, number + 1)]


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{folder.parent} cannot be written ({error.strerror or error}): a GGUF file's tokenizer is kept "
        "there; XDG_CACHE_HOME names another folder"
    )
