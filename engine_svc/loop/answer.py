"""Resolves futures of other threads with the results of work in the engine thread. Knows no wire."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from engine_svc.core.control import RanksDisagree, Refused
from engine_svc.core.errors import DeviceLost, clear_frames
from triptych_kit.errors import FailedPrecondition, Internal

logger = logging.getLogger(__name__)

T = TypeVar("T")


def give(answer: Future[T], work: Callable[[], T]) -> None:
    """Run `work` and resolve `answer` with its result or exception; skip it if the future was cancelled.

    Errors after which the engine cannot continue are also raised here, so that they end the loop.
    """
    if not answer.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except Refused as error:
        answer.set_exception(FailedPrecondition(str(error)))
    except (RanksDisagree, DeviceLost):
        answer.set_exception(Internal("the engine has failed and ends"))
        raise
    except Exception as error:  # noqa: BLE001  Every error is the result of the call.
        clear_frames(error)
        answer.set_exception(error)
    else:
        answer.set_result(result)
