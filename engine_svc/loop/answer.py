"""How work in the engine thread is answered to who waits for it elsewhere. Knows no wire."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from engine_svc.core.errors import clear_frames
from service_kit.errors import Internal

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineBroken(RuntimeError):
    """What was asked for has left an engine that cannot go on: its loop has to end."""


def give(answer: Future[T], work: Callable[[], T]) -> None:
    """Do `work` for who waits for `answer`, unless he has given up; errors are his as well.

    EngineBroken alone is also raised here, where it ends the loop.
    """
    if not answer.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except EngineBroken as error:
        answer.set_exception(Internal("the engine cannot go on, and ends"))
        raise error
    except Exception as error:  # noqa: BLE001  Whatever it is, it belongs to who waits for the answer.
        clear_frames(error)
        answer.set_exception(error)
    else:
        answer.set_result(result)
