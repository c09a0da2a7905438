"""Keeps transformers from writing bars and reports while a model is loaded: what there is to say, we say."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no messages below critical inside the block; as before after it."""
    verbosity = transformers_logging.get_verbosity()
    has_bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bar:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
