"""Chooses the client of an engine's core for a caller's needs."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.config import EngineConfig
from launcher.engines.async_client import AsyncEngineClient
from launcher.engines.in_process import InProcessClient, load_in_process
from launcher.engines.sync_client import SyncEngineClient


def make_engine_client(
    *, is_async: bool, addresses: Sequence[str] = (), config: EngineConfig | None = None
) -> InProcessClient | SyncEngineClient | AsyncEngineClient:
    """The client for the engines at `addresses`, or else for a new engine of `config` in this process.

    NotImplementedError for an asyncio client of an engine in this process: it would have to step the model
    in the event loop. The caller must start an `AsyncEngineClient`.
    """
    if addresses and config is not None:
        raise ValueError("either addresses of engines or the configuration of one, not both")
    if addresses:
        return AsyncEngineClient(addresses) if is_async else SyncEngineClient(addresses)
    if is_async:
        raise NotImplementedError("an asyncio client needs an engine in another process")
    if config is None:
        raise ValueError("neither addresses of engines nor the configuration of one")
    return load_in_process(config)
