"""The reported state of the engines of one lockstep group. Knows no orders, no limits and no streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rank:
    """Identity of an engine in a lockstep group, and the address others connect to if it becomes rank 0."""

    engine_id: str
    engine_epoch: int
    dp_rank: int  # its position in the order; the rank in a generation is the index among the members
    dp_size: int  # the group size that the engine was started with
    host: str
    store_port: int


@dataclass(frozen=True, slots=True)
class RankReport:
    """State of an engine; part of each of its reports.

    generation: the one whose process group it is in; 0: none.  is_loaded: it is ready to be a member.
    was_formed: it has been in some generation before.  is_leaving: it drains and will leave.
    """

    generation: int = 0
    is_loaded: bool = False
    was_formed: bool = False
    is_leaving: bool = False


@dataclass(slots=True)
class _Entry:
    rank: Rank
    report: RankReport
    lost_at: float | None = None  # when its session was lost
    loaded_at: float = 0.0  # when it first reported to be loaded
    apart_at: float | None = None  # when it lost its generation


@dataclass(slots=True)
class _Silence:
    generation: int  # the last one that the engine reported
    since: float
    is_given_up: bool = False


class Ranks:
    """The engines of one group. An engine is open while it has a session, else lost, until it is gone."""

    def __init__(self) -> None:
        self.newest = 0  # greatest generation that any engine has ever reported
        self._entries: dict[str, _Entry] = {}
        self.reduced = 0  # the newest generation of which a member has ended
        self._silent: dict[tuple[str, int], _Silence] = {}  # processes whose lease has ended

    def join(self, rank: Rank) -> None:
        """An engine has registered. The same epoch is the same process; its last report stays valid."""
        entry = self._entries.get(rank.engine_id)
        if entry is not None and entry.rank.engine_epoch == rank.engine_epoch:
            entry.rank, entry.lost_at = rank, None
            return
        self._silent.pop((rank.engine_id, rank.engine_epoch), None)
        for process in [process for process in self._silent if process[0] == rank.engine_id]:
            self.reduced = max(self.reduced, self._silent.pop(process).generation)
        if entry is not None:
            self.reduced = max(self.reduced, entry.report.generation)
        self._entries[rank.engine_id] = _Entry(rank, RankReport())

    def report(self, engine_id: str, report: RankReport, now: float) -> None:
        """Apply an engine's report; that of an engine that has not joined is ignored."""
        entry = self._entries.get(engine_id)
        if entry is None:
            return
        before = entry.report
        was_formed = report.was_formed or before.was_formed or report.generation > 0
        # Engines never unload, so an engine that was loaded once stays loaded.
        is_loaded = report.is_loaded or before.is_loaded or was_formed
        entry.report = RankReport(report.generation, is_loaded, was_formed, report.is_leaving)
        self.newest = max(self.newest, report.generation)
        if is_loaded and not before.is_loaded:
            entry.loaded_at = now
        if report.generation or not was_formed:
            entry.apart_at = None
        elif entry.apart_at is None:
            entry.apart_at = now

    def lose(self, engine_id: str, now: float) -> None:
        """The session of an engine is lost; the engine may still be alive."""
        entry = self._entries.get(engine_id)
        if entry is not None and entry.lost_at is None:
            entry.lost_at = now

    def leave(self, engine_id: str, now: float, *, has_ended: bool) -> None:
        """An engine is no longer a member. has_ended: its process is known to have ended, not only silent."""
        entry = self._entries.pop(engine_id, None)
        if entry is None:
            return
        if has_ended:
            self.reduced = max(self.reduced, entry.report.generation)
        elif entry.report.generation:
            process = (engine_id, entry.rank.engine_epoch)
            self._silent[process] = _Silence(entry.report.generation, now)
        if not self._entries:
            # If all engines are silent, the fault is probably the coordinator's.
            self._silent.clear()

    def give_up_silent(self, now: float, patience_s: float) -> float | None:
        """Treat engines silent for `patience_s` as gone; returns when to call it again, or None."""
        formed = self.generation
        for process, silence in list(self._silent.items()):
            if silence.generation < formed:
                del self._silent[process]
            elif now >= silence.since + patience_s:
                silence.is_given_up = True
        waiting = [one.since + patience_s for one in self._silent.values() if not one.is_given_up]
        return min(waiting, default=None)

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, engine_id: str) -> Rank | None:
        entry = self._entries.get(engine_id)
        return entry.rank if entry else None

    def of(self, engine_id: str) -> RankReport:
        """The last report of an engine; an empty one if it is not known."""
        entry = self._entries.get(engine_id)
        return entry.report if entry else RankReport()

    def is_open(self, engine_id: str) -> bool:
        entry = self._entries.get(engine_id)
        return entry is not None and entry.lost_at is None

    def lost_at(self, engine_id: str) -> float | None:
        """When the engine lost its session, or None."""
        entry = self._entries.get(engine_id)
        return entry.lost_at if entry else None

    @property
    def size(self) -> int:
        """The group size that the engines were started with."""
        return max((entry.rank.dp_size for entry in self._entries.values()), default=0)

    @property
    def generation(self) -> int:
        """The current generation: the one that most engines report, the newest if several tie. 0: none.

        Lost engines are not counted, unless all are lost: then the fault is probably the coordinator's.
        """
        entries = [entry for entry in self._entries.values() if entry.lost_at is None]
        return _most_common(entry.report.generation for entry in entries or self._entries.values())

    @property
    def formed(self) -> tuple[str, ...]:
        """The engines whose last report has the current generation, in order of rank."""
        generation = self.generation
        if not generation:
            return ()
        return self._ordered(
            id_ for id_, entry in self._entries.items() if entry.report.generation == generation
        )

    @property
    def has_lost_formed(self) -> bool:
        """Whether any engine of `formed` has no session."""
        return not all(self.is_open(engine_id) for engine_id in self.formed)

    @property
    def has_lost(self) -> bool:
        """Whether any engine that has been in a generation has no session."""
        return any(e.lost_at is not None and e.report.was_formed for e in self._entries.values())

    @property
    def is_reduced(self) -> bool:
        """Whether a member of the current generation has ended, though the others may not know it yet.

        One that has been silent for long counts as ended here, but not in `reduced`: it may still step with
        the others, which then change over only when it can.
        """
        formed = self.generation
        given_up = (one.generation for one in self._silent.values() if one.is_given_up)
        return formed > 0 and (formed == self.reduced or formed in given_up)

    @property
    def are_all_leaving(self) -> bool:
        """Whether each engine of the current generation has a session and reports that it leaves."""
        formed = self.formed
        return bool(formed) and all(self.is_open(id_) and self.of(id_).is_leaving for id_ in formed)

    @property
    def is_founded(self) -> bool:
        """Whether any engine has been in a generation; then the group may run without being complete."""
        return any(entry.report.was_formed for entry in self._entries.values())

    @property
    def broken_at(self) -> float | None:
        """When the first engine lost its generation. None: no engine did."""
        return min(
            (
                entry.apart_at
                for entry in self._entries.values()
                if _is_apart(entry) and entry.apart_at is not None
            ),
            default=None,
        )

    def fresh_since(self, among: Iterable[str]) -> float:
        """When the first of those engines that were never in a generation was loaded; -inf: none."""
        entries = [self._entries[engine_id] for engine_id in among]
        return min((e.loaded_at for e in entries if not e.report.was_formed), default=float("-inf"))

    def candidates(self, leaving: Collection[str], limit: int) -> tuple[str, ...]:
        """The engines that can be members, in order of rank: open, loaded, not leaving.

        Beyond `limit`, engines that have been in a generation are preferred.
        """
        able = [
            engine_id
            for engine_id, entry in self._entries.items()
            if entry.lost_at is None
            and entry.report.is_loaded
            and not entry.report.is_leaving
            and engine_id not in leaving
        ]
        if len(able) > limit:
            able.sort(key=lambda id_: (not self._entries[id_].report.was_formed, self._rank_key(id_)))
            del able[limit:]
        return self._ordered(able)

    def leavers(self, members: Collection[str]) -> tuple[str, ...]:
        """The open engines that have been in a generation and are not in `members`, in order of rank."""
        return self._ordered(
            id_
            for id_, entry in self._entries.items()
            if id_ not in members and entry.lost_at is None and entry.report.was_formed
        )

    def _ordered(self, engine_ids: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted(engine_ids, key=self._rank_key))

    def _rank_key(self, engine_id: str) -> tuple[int, str]:
        return self._entries[engine_id].rank.dp_rank, engine_id


def _is_apart(entry: _Entry) -> bool:
    report = entry.report
    return entry.lost_at is None and report.was_formed and not report.generation and not report.is_leaving


def _most_common(generations: Iterable[int]) -> int:
    counts = Counter(generation for generation in generations if generation)
    return max(counts, key=lambda generation: (counts[generation], generation), default=0)
