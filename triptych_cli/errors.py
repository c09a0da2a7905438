"""All exceptions of `triptych.LLM` in one module. Importing it loads no model code.

A model that cannot be served raises a ModelError, which is a ValueError. Everything else is a ServiceError
with a code, also where the engine is in the same process. A misspelt argument is a TypeError.
"""

from __future__ import annotations

from engine_svc.model.errors import CheckpointError, ModelError, UnsupportedModel
from triptych_cli.engines.own_engine import EngineDead
from triptych_kit.config import ConfigError
from triptych_kit.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    Unimplemented,
)

__all__ = [
    "Aborted",
    "Cancelled",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "EngineDead",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "ModelError",
    "NotFound",
    "ResourceExhausted",
    "ServiceError",
    "Unavailable",
    "Unimplemented",
    "UnsupportedModel",
]
