"""Checkpoints made once for all system tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.checkpoints import (
    ARCHITECTURES,
    make_checkpoint,
    make_slow_llama,
    make_thinking_llama,
)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        architecture: make_checkpoint(architecture, root / architecture) for architecture in ARCHITECTURES
    }


@pytest.fixture(scope="session")
def llama(checkpoints: dict[str, Path]) -> str:
    """The folder of the Llama checkpoint, as a flag takes it."""
    return str(checkpoints["llama"])


@pytest.fixture(scope="session")
def slow_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_slow_llama(tmp_path_factory.mktemp("slow-llama")))


@pytest.fixture(scope="session")
def thinking_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a Llama that has tokens to open and to end reasoning, and a chat template."""
    return str(make_thinking_llama(tmp_path_factory.mktemp("thinking-llama")))
