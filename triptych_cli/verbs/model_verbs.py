"""The verbs `pull`, `list` and `rm`: models of the hub in its cache, which `serve` reads, too."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from triptych_kit.process.setup import prepare_process

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

_FAILURE = 1
_USAGE_ERROR = 2

Name = Annotated[str, typer.Argument(help="org/name of the hub")]


def pull(
    model: Name,
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit (default: main)")] = None,
) -> None:
    """Download a model of the hub, and print its folder. Of org/name:Q4_K_M: the GGUF file of that type.

    It is kept in the cache of the hub, where `serve` finds it. HF_TOKEN is for private and gated models.
    """
    prepare_process("client")
    from engine_svc.core.facts import LoadProgress
    from engine_svc.model.errors import CheckpointError
    from engine_svc.model.loading.hub import find_model, is_hub_id
    from engine_svc.process.load_display import LoadDisplay
    from triptych_kit.clock import MonotonicClock

    if not is_hub_id(model):
        _refuse("pull", f"{model} is no org/name of the hub")
    display = LoadDisplay(sys.stderr, MonotonicClock())
    try:
        folder = find_model(
            model,
            revision=revision,
            progress=lambda phase, done, total: display.show(LoadProgress(phase, done, total)),
        )
    except CheckpointError as error:
        display.close()
        print(f"triptych pull: {error}", file=sys.stderr)
        raise typer.Exit(_FAILURE) from error
    display.close()
    print(folder)


def list_models() -> None:
    """Show the models in the cache of the hub."""
    prepare_process("client")
    cache = _cache()
    models = sorted(_models(cache), key=lambda one: one.repo_id)
    for one in models:
        used = datetime.fromtimestamp(one.last_accessed).strftime("%Y-%m-%d %H:%M")
        print(f"{_shown(one.size_on_disk):>9}  {used}  {one.repo_id}")
    print(f"{_shown(sum(one.size_on_disk for one in models)):>9}  in {_folder()}")


def remove(model: Name) -> None:
    """Remove a model from the cache of the hub."""
    prepare_process("client")
    cache = _cache()
    removed = next((one for one in _models(cache) if one.repo_id == model), None)
    if cache is None or removed is None:
        _refuse("rm", f"{model} is not in {_folder()}; `triptych list` shows the models there")
    # Of this model alone: a copy of it on the hub has the same commits.
    own = dataclasses.replace(cache, repos=frozenset((removed,)))
    strategy = own.delete_revisions(*(revision.commit_hash for revision in removed.revisions))
    strategy.execute()
    if removed.repo_path.exists():
        print(f"triptych rm: {removed.repo_path} cannot be removed", file=sys.stderr)
        raise typer.Exit(_FAILURE)
    print(f"{model}: {_shown(strategy.expected_freed_size)} are free again")


def _cache() -> HFCacheInfo | None:
    """The contents of the cache; None where there is none yet."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(_folder())
    except CacheNotFound:
        return None


def _models(cache: HFCacheInfo | None) -> Iterator[CachedRepoInfo]:
    if cache is not None:
        yield from (one for one in cache.repos if one.repo_type == "model")


def _folder() -> str:
    from huggingface_hub import constants

    return os.fspath(constants.HF_HUB_CACHE)


def _shown(num_bytes: int) -> str:
    from engine_svc.build.start_check import shown_size

    return shown_size(num_bytes)


def _refuse(verb: str, cause: str) -> NoReturn:
    print(f"triptych {verb}: {cause}", file=sys.stderr)
    raise typer.Exit(_USAGE_ERROR)
