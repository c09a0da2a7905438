"""Errors of executors, of requests and of state machines. Knows no device."""

from __future__ import annotations

import logging
import traceback

logger = logging.getLogger(__name__)


class InvalidTransition(RuntimeError):
    """A state machine was given a transition that its table does not have: a bug in the engine."""


class DeviceLost(RuntimeError):
    """No further step can run: the process has to end."""


class DeviceFull(RuntimeError):
    """A step ran out of device memory; one with fewer tokens may succeed."""


class PeersLost(RuntimeError):
    """Another rank of the lockstep group is gone, so that a step or a vote cannot finish.

    No request is the cause: all of them run again once the remaining ranks have formed a group.
    """


class RequestFailed(Exception):
    """One request cannot be served and ends alone, with this status.

    code: name of a gRPC status code; "" for that of an internal error.  reason: for programs, "" if the code
    says all.  field: of the ADD, if that is what is refused.  rules: of the request, if they leave no token.
    """

    def __init__(
        self, code: str, message: str, reason: str = "", field: str = "", rules: tuple[str, ...] = ()
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason
        self.field = field
        self.rules = rules


def describe_failure(feature: str, error: Exception) -> str:
    """Log what a feature raised; returns the message for the requests that end by it."""
    logger.error("a feature failed, the requests that use it end", exc_info=error, extra={"feature": feature})
    return f"{feature} failed: {type(error).__name__}: {error}"


def clear_frames(error: BaseException) -> None:
    """Release the local variables of the frames that raised `error`, e.g. weights; keeps the traceback.

    Frames and the object that keeps their error form a cycle. Without this, these variables would live until
    a full garbage collection, which may never happen in an engine.
    """
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__
