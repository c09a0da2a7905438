"""Outstanding commands of each engine: sent or to be sent, and not answered. Knows no streams.

An engine has at most one command of each kind, and a new one replaces an earlier one, so the number is
bounded. A command without an answer when a session ends is sent again by the next one, under the same id.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from triptych.common.v1 import error_pb2
from triptych.coordinator.v1 import command_pb2

logger = logging.getLogger(__name__)

# Called with the engine id and, if the command was refused, the reason.
OnResult: TypeAlias = "Callable[[str, error_pb2.ErrorStatus | None], None]"


class Kind(Enum):
    """The subject of a command; the latest command of a kind replaces earlier ones."""

    WAVE = "wave"
    MEMBERSHIP = "membership"
    DRAIN = "drain"
    INTERVAL = "interval"


_KINDS = {
    "start_wave": Kind.WAVE,
    "prepare_scale": Kind.MEMBERSHIP,
    "commit_scale": Kind.MEMBERSHIP,
    "abort_scale": Kind.MEMBERSHIP,
    "drain": Kind.DRAIN,
    "update_interval": Kind.INTERVAL,
}


@dataclass(slots=True)
class _Outstanding:
    command: command_pb2.Command
    on_result: OnResult | None
    is_sent: bool = False


@dataclass(slots=True)
class _Engine:
    outstanding: dict[Kind, _Outstanding] = field(default_factory=dict)
    session_id: int | None = None
    wake: Callable[[], None] | None = None


class Commands:
    """The outstanding commands of all engines. An engine is known from its registration until it is gone.

    first_id: the first id to assign. A later coordinator begins above the ids of the one before, so that an
    engine never takes a new command for a repetition.
    """

    def __init__(self, *, first_id: int = 1) -> None:
        self.num_refused = 0
        self._ids = itertools.count(first_id)
        self._engines: dict[str, _Engine] = {}

    @property
    def num_outstanding(self) -> int:
        return sum(len(engine.outstanding) for engine in self._engines.values())

    def open(self, engine_id: str, session_id: int, wake: Callable[[], None]) -> None:
        """An engine has a session; `wake` is called when there is a command to send in it."""
        engine = self._engines.setdefault(engine_id, _Engine())
        if engine.session_id != session_id:
            for outstanding in engine.outstanding.values():
                outstanding.is_sent = False
        engine.session_id, engine.wake = session_id, wake
        if engine.outstanding:
            wake()

    def close(self, engine_id: str, session_id: int) -> None:
        """The session has ended. Commands wait for the next one."""
        engine = self._engines.get(engine_id)
        if engine is not None and engine.session_id == session_id:
            engine.session_id = engine.wake = None

    def forget(self, engine_id: str) -> None:
        """An engine is gone, or another process has its id: its commands are void."""
        self._engines.pop(engine_id, None)

    def has_session(self, engine_id: str) -> bool:
        engine = self._engines.get(engine_id)
        return engine is not None and engine.session_id is not None

    def put(self, engine_id: str, command: command_pb2.Command, on_result: OnResult | None = None) -> bool:
        """Assign an id to a command and queue it. False if the engine is not known.

        A command equal to the outstanding one keeps its id and is sent again.
        """
        engine = self._engines.get(engine_id)
        if engine is None:
            return False
        kind = _KINDS[command.WhichOneof("command") or ""]
        before = engine.outstanding.get(kind)
        command.command_id = before.command.command_id if before is not None else 0
        if before is None or before.command != command:
            command.command_id = next(self._ids)
        engine.outstanding[kind] = _Outstanding(command, on_result)
        if engine.wake is not None:
            engine.wake()
        return True

    def drop(self, engine_id: str, kind: Kind) -> None:
        """Withdraw a command. If it was sent already, its answer is ignored."""
        engine = self._engines.get(engine_id)
        if engine is not None:
            engine.outstanding.pop(kind, None)

    def take_unsent(self, engine_id: str, session_id: int) -> list[command_pb2.Command]:
        """Mark the commands to be sent in that session as sent; returns them in order of ids."""
        engine = self._engines.get(engine_id)
        if engine is None or engine.session_id != session_id:
            return []
        unsent = [outstanding for outstanding in engine.outstanding.values() if not outstanding.is_sent]
        for outstanding in unsent:
            outstanding.is_sent = True
        return sorted((outstanding.command for outstanding in unsent), key=lambda command: command.command_id)

    def take_result(self, engine_id: str, result: command_pb2.CommandResult) -> bool:
        """Apply an answer. False if its command is not outstanding, e.g. because it was replaced."""
        outstanding = self._take(engine_id, result.command_id)
        if outstanding is None:
            return False
        refusal = None if result.WhichOneof("result") == "ack" else result.nack
        if refusal is not None:
            self.num_refused += 1
            fields = {"engine_id": engine_id, "command": outstanding.command.WhichOneof("command")}
            logger.info("command refused", extra={**fields, "cause": refusal.message})
        if outstanding.on_result is not None:
            outstanding.on_result(engine_id, refusal)
        return True

    def _take(self, engine_id: str, command_id: int) -> _Outstanding | None:
        engine = self._engines.get(engine_id, _Engine())
        kinds = (k for k, one in engine.outstanding.items() if one.command.command_id == command_id)
        kind = next(kinds, None)
        return None if kind is None else engine.outstanding.pop(kind)
