"""The load of each engine, and when it is published to frontends. Knows no gRPC, protos or membership."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_PUBLISH_INTERVAL_S = 0.1
MIN_MEMBERS_INTERVAL_S = 0.01
MAX_PUBLISH_INTERVAL_S = 5.0
_EARLY_S = 0.0005
_MAX_BURST = 8  # messages that may be sent without pacing


@dataclass(frozen=True, slots=True)
class Load:
    """Load of an engine from its latest report, as far as routing needs it."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens of waiting requests that are not cached
    num_used_blocks: int = 0
    num_total_blocks: int = 0


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A load with its position in the order of its engine's reports."""

    engine_epoch: int
    seq: int  # grows with each report of a session
    step_number: int  # never falls within a session
    load: Load


@dataclass(slots=True)
class _StoredReport:
    report: LoadReport
    version: int


class LoadTable:
    """The newest load of every engine. Each engine has its own order of reports: there is no common clock."""

    def __init__(self) -> None:
        self.version = 0
        self.num_stale = 0
        self._entries: dict[str, _StoredReport] = {}

    def put(self, engine_id: str, report: LoadReport) -> bool:
        """Store a report unless a newer one is stored already; returns whether it was stored.

        Within a session, reports are ordered by (seq, step number). Another epoch is another process and
        always counts as newer: the registry checks that it is the current one.
        """
        entry = self._entries.get(engine_id)
        if entry is not None and entry.report.engine_epoch == report.engine_epoch:
            held = entry.report
            if report.seq <= held.seq or report.step_number < held.step_number:
                self.num_stale += 1
                return False
            if report.load == held.load:
                entry.report = report
                return True
        self.version += 1
        self._entries[engine_id] = _StoredReport(report, self.version)
        return True

    def restart_order(self, engine_id: str) -> None:
        """Reset the report order of an engine that opens another session in the same epoch.

        The step number is reset as well: a wrong one must not make all later reports look stale.
        """
        entry = self._entries.get(engine_id)
        if entry is not None:
            held = entry.report
            entry.report = LoadReport(held.engine_epoch, 0, 0, held.load)

    def forget(self, engine_id: str) -> None:
        """Drop the load of an engine that is gone."""
        self._entries.pop(engine_id, None)

    def find(self, engine_id: str) -> LoadReport | None:
        """The newest report of that engine, or None."""
        entry = self._entries.get(engine_id)
        return entry.report if entry else None

    def changed_since(self, version: int) -> dict[str, LoadReport]:
        """The reports whose load changed after `version`, by engine id."""
        return {id_: entry.report for id_, entry in self._entries.items() if entry.version > version}


class PublishTimer:
    """When one subscriber gets its next message: at once for members and waves, soon for loads, else rarely.

    Loads are sent at whole intervals of the clock, to all subscribers at the same moment, so that one delta
    serves all of them. After a burst of messages, changes of members are batched as well, every 10 ms: a
    fleet that starts or stops as one changes them a thousand times.
    """

    def __init__(self, now: float) -> None:
        self._published_at = now
        self._paced_at = now - _MAX_BURST * MIN_MEMBERS_INTERVAL_S

    def published(self, now: float) -> None:
        """Note that the subscriber has just been sent everything."""
        self._published_at = now
        earliest = now - _MAX_BURST * MIN_MEMBERS_INTERVAL_S
        self._paced_at = max(self._paced_at, earliest) + MIN_MEMBERS_INTERVAL_S

    def wait_s(self, now: float, *, members_changed: bool, loads_changed: bool) -> float:
        """Seconds until the next message is due; 0 means now."""
        if members_changed:
            due_at = self._paced_at
        elif loads_changed:
            due_at = _next_tick(self._published_at)
        else:
            due_at = self._published_at + MAX_PUBLISH_INTERVAL_S
        return max(0.0, due_at - now)


def _next_tick(now: float) -> float:
    # A timer may fire this much early; the same tick must not be returned twice.
    return (math.floor((now + _EARLY_S) / MIN_PUBLISH_INTERVAL_S) + 1) * MIN_PUBLISH_INTERVAL_S
