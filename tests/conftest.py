"""What must be settled before any test module is imported, and what no test may leave behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Triton decides how it runs kernels when it is first imported, which transformers does, too.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long those tests go on that may go on for as long as somebody wants."""
    parser.addoption(
        "--num-orders",
        type=int,
        default=20,
        help="orders of pauses and resumes that a lockstep group goes through",
    )


@pytest.fixture(autouse=True)
def log_level_as_it_was() -> Iterator[None]:
    """A service that a test starts in this process says how much it logs; that is not for the next test."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
