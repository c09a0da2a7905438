"""Engines of one lockstep group that live, die and meet, in virtual time, around a real formation.

The world keeps the books that no single process has: what each rank was sent, by number, and which ranks met.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from coordinator_svc.data_parallel.formation import Abort, Commit, Formation, Order, Prepare
from coordinator_svc.data_parallel.ranks import Rank, RankReport

_LEASE_S = 3.0


@dataclass
class Session:
    """What is on its way between an engine and the coordinator, in order, each way."""

    down: list[Order] = field(default_factory=list)
    up: list[RankReport | tuple[Order, str | None]] = field(default_factory=list)


@dataclass
class Engine:
    """One engine process, and the one that takes its place when it dies."""

    engine_id: str
    dp_rank: int
    epoch: int = 1
    is_alive: bool = True
    is_loaded: bool = False
    was_formed: bool = False
    is_leaving: bool = False
    generation: int = 0
    ready: int = 0  # the newest generation it was asked to commit
    formed: int = 0  # the newest it was in
    prepared: Prepare | None = None
    unanswered: Prepare | None = None  # being prepared
    session: Session | None = None
    seen_coordinator: int = 0

    def restart(self) -> None:
        """Another process under the same id, which knows nothing of the one before."""
        epoch = self.epoch + 1
        self.__init__(self.engine_id, self.dp_rank, epoch)  # type: ignore[misc]

    def obey(self, order: Order) -> str | None:
        """Do what an engine has to; returns why not. A prepare that is taken is answered later."""
        match order:
            case Prepare():
                known = self.prepared or self.unanswered
                if order == known:
                    return None
                newest = max(self.ready, self.formed, known.generation if known else 0)
                if order.generation <= newest:
                    return f"generation {order.generation} is not above {newest}"
                self.prepared, self.unanswered = None, order
                self.is_leaving = self.is_leaving or order.rank is None
            case Commit():
                if order.generation in (self.ready, self.formed):
                    return None
                if self.prepared is None or self.prepared.generation != order.generation:
                    return f"generation {order.generation} is not prepared"
                self.ready = order.generation
            case Abort():
                if self.ready < order.generation:
                    self.forget()
        return None

    def forget(self) -> None:
        """Drop what is prepared and not to be committed."""
        self.unanswered = None
        if self.prepared is not None and self.prepared.generation > self.ready:
            self.prepared = None

    @property
    def waits_at(self) -> Prepare | None:
        """Where it waits for the others of a generation now."""
        is_due = self.is_alive and self.generation == 0 and self.ready > self.formed
        return self.prepared if is_due and self.prepared is not None else None

    def report(self) -> RankReport:
        return RankReport(self.generation, self.is_loaded, self.was_formed, self.is_leaving)


class World:
    """A group of `size` engines and its coordinator. Raises AssertionError when two groups share a number."""

    def __init__(self, seed: int, size: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.size = size
        self.engines = [Engine(f"e{rank}", rank) for rank in range(size)]
        self.meetings: dict[int, tuple[int, str, int]] = {}  # by generation: its size and where it meets
        self.processes: dict[tuple[int, int], tuple[str, int]] = {}  # by generation and rank: which process
        self.met: dict[int, frozenset[tuple[str, int]]] = {}
        self.num_coordinators = 0
        self._lost_at: dict[str, float] = {}
        self._sent: dict[str, Order] = {}
        self.restart_coordinator()

    def restart_coordinator(self) -> None:
        """All sessions end, and another coordinator knows nothing."""
        self.num_coordinators += 1
        for engine in self.engines:
            engine.session = None
        self._lost_at.clear()
        self._sent.clear()
        # As a coordinator does it: from the clock, in ms, so that no number is given twice.
        first = round(self.now * 1000) + 1
        self.formation = Formation(first_generation=first, settled_at=self.now + _LEASE_S)

    def connect(self, engine: Engine) -> None:
        """Register, as soon as the coordinator knows that a session before it has ended."""
        if engine.seen_coordinator != self.num_coordinators:
            engine.seen_coordinator = self.num_coordinators
            engine.forget()
        engine.session = Session(up=[engine.report()])
        self._lost_at.pop(engine.engine_id, None)
        self._sent.pop(engine.engine_id, None)
        rank = Rank(engine.engine_id, engine.epoch, engine.dp_rank, self.size, engine.engine_id, 1)
        self.formation.join(rank)

    def disconnect(self, engine: Engine) -> None:
        """The session breaks, and all that was on its way in it is lost."""
        if engine.session is not None:
            engine.session = None
            self.formation.lose(engine.engine_id, self.now)
            self._lost_at[engine.engine_id] = self.now

    def kill(self, engine: Engine) -> None:
        self.disconnect(engine)
        engine.is_alive, engine.generation = False, 0

    def advance(self, seconds: float) -> None:
        """Let time pass; leases end, and the coordinator does what is due."""
        self.now += seconds
        for engine_id, lost_at in list(self._lost_at.items()):
            if self.now >= lost_at + _LEASE_S:
                del self._lost_at[engine_id]
                self.formation.leave(engine_id, self.now, has_ended=False)
        self._step_coordinator()

    def _step_coordinator(self) -> None:
        self.formation.step(self.now)
        orders = self.formation.orders()
        for engine in self.engines:
            order = orders.get(engine.engine_id)
            if order is None:
                self._sent.pop(engine.engine_id, None)
            elif engine.session is not None and self._sent.get(engine.engine_id) != order:
                self._sent[engine.engine_id] = order
                self._note_order(engine, order)
                engine.session.down.append(order)

    def move(self, engine: Engine) -> None:
        """Let one thing happen to an engine that is alive: chosen by chance, each within few turns."""
        session, choice = engine.session, self.random.random()
        if choice < 0.1 and not engine.is_loaded:
            engine.is_loaded = True
        elif session is None:
            if choice < 0.5:
                self.connect(engine)
        elif choice < 0.3 and session.down:
            order = session.down.pop(0)
            refusal = engine.obey(order)
            if refusal is not None or not isinstance(order, Prepare) or order == engine.prepared:
                session.up.append((order, refusal))
        elif choice < 0.5 and engine.unanswered is not None:
            engine.prepared, engine.unanswered = engine.unanswered, None
            session.up.append((engine.prepared, None))
        elif choice < 0.8 and session.up:
            self._deliver(engine, session.up.pop(0))
        elif choice < 0.9:
            session.up.append(engine.report())
        self._change_over(engine)
        self._step_coordinator()

    def _deliver(self, engine: Engine, message: RankReport | tuple[Order, str | None]) -> None:
        if isinstance(message, RankReport):
            self.formation.report(engine.engine_id, message, self.now)
        else:
            self.formation.answer(engine.engine_id, message[0], self.now, refusal=message[1])

    def _change_over(self, engine: Engine) -> None:
        """Ranks of a generation leave it when all are ready for another, or when one of them is dead."""
        if engine.generation:
            met = self.met[engine.generation]
            peers = [one for one in self.engines if (one.engine_id, one.epoch) in met]
            stands = len(peers) == len(met) and all(one.generation == engine.generation for one in peers)
            if not stands or all(one.ready > engine.generation for one in peers):
                for one in peers if stands else [engine]:
                    one.generation = 0
        order = engine.waits_at
        if order is None:
            return
        if order.rank is None:
            self._exit(engine)
            return
        waiting = [one for one in self.engines if one.waits_at is not None and _meet(one.waits_at, order)]
        if len(waiting) == order.size:
            self._meet(waiting, order.generation)

    def _exit(self, engine: Engine) -> None:
        engine.is_alive = False
        if engine.session is not None:
            engine.session = None
            self.formation.leave(engine.engine_id, self.now, has_ended=True)

    def _meet(self, engines: list[Engine], generation: int) -> None:
        members = frozenset((one.engine_id, one.epoch) for one in engines)
        assert self.met.setdefault(generation, members) == members, f"two groups met as {generation}"
        for one in engines:
            assert generation > one.formed, f"{one.engine_id} went from {one.formed} to {generation}"
            one.generation = one.formed = generation
            one.was_formed = True

    def _note_order(self, engine: Engine, order: Order) -> None:
        if not isinstance(order, Prepare):
            return
        meeting = (order.size, order.host, order.store_port)
        assert self.meetings.setdefault(order.generation, meeting) == meeting
        if order.rank is not None:
            process = (engine.engine_id, engine.epoch)
            assert self.processes.setdefault((order.generation, order.rank), process) == process


def _meet(one: Prepare, other: Prepare) -> bool:
    return one.rank is not None and one.generation == other.generation
