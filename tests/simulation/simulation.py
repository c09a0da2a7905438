"""One random life of an engine core, drawn from a seed: arrivals, aborts, pauses, sessions, overlap."""

from __future__ import annotations

import random
from collections import Counter

from engine_svc.core.request import Request, RequestStatus
from engine_svc.scheduler.config import PauseState
from tests.simulation.broken import BrokenInvariant
from tests.simulation.setup import draw_setup
from tests.simulation.workload import BLOCKER, Workload
from tests.simulation.world import World

# The whole state is looked at in every so many steps, and after whatever may upset it.
CHECK_INTERVAL = 10
MAX_STEPS_PER_REQUEST = 60
_PAUSES = tuple(PauseState)


class Simulation:
    """A workload drawn from a seed, run to its end with every invariant checked on the way."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.setup = draw_setup(self._rng)
        self.world = World(self.setup, self._rng)
        self._workload = Workload(self.setup, self._rng)
        self._arrivals = 0.0  # that are due

    def run(self, num_requests: int) -> Counter[str]:
        """Serve so many requests to their end; returns what happened, by name. Raises what does not hold."""
        world = self.world
        max_steps = 100 + num_requests * MAX_STEPS_PER_REQUEST
        num_added = 0
        while num_added < num_requests or world.histories:
            world.now += 1.0
            self._arrivals += self.setup.arrival_rate
            while self._arrivals >= 1.0:
                self._arrivals -= 1.0
                num_added += num_added < num_requests and self._add()
            self._turn(is_ending=num_added >= num_requests)
            if world.num_steps > max_steps:
                raise BrokenInvariant(
                    "progress", f"{len(world.histories)} requests are left at step {max_steps}"
                )
        while world.in_flight:
            world.finish_oldest()
        while world.features.held:
            world.features.release_held()
        world.let_pins_expire()
        world.check_idle()
        counts = world.counts()
        counts["request"] = num_added
        return counts

    def _turn(self, *, is_ending: bool) -> None:
        """A step, with accidents before it and between its launch and its result."""
        world, random, rate = self.world, self._rng.random, self.setup.accident_rate
        has_accidents = random() < rate, random() < rate
        if has_accidents[0]:
            self._have_an_accident()
        if is_ending or random() < 0.3:
            self._help()
        plan = world.launch()
        if has_accidents[1]:
            self._have_an_accident()
        self._finish_steps(can_launch=bool(plan.request_ids))
        for request in world.ended:
            self._workload.remember(request)
        world.ended.clear()
        if any(has_accidents) or world.num_steps % CHECK_INTERVAL == 0:
            world.check()

    def _finish_steps(self, *, can_launch: bool) -> None:
        """As many as an engine's loop would: one where no more may be in flight, now and then another."""
        world = self.world
        if world.in_flight and not can_launch:
            world.finish_oldest()
        while len(world.in_flight) >= self.setup.scheduler.max_steps_in_flight:
            world.finish_oldest()
        if world.in_flight and self._rng.random() < 0.1:
            world.finish_oldest()

    def _add(self) -> bool:
        random = self._rng.random
        request = self._workload.draw(self.world.now)
        num_remote_tokens = 0
        if self.setup.has_remote_loads and random() < 0.4:
            num_remote_tokens = int(random() * (request.num_tokens - 1))
        is_sent = self.setup.has_senders and random() < 0.4
        return self.world.add(request, num_remote_tokens=num_remote_tokens, is_sent=is_sent)

    def _have_an_accident(self) -> None:
        world, rng = self.world, self._rng
        draw = rng.random()
        if draw < 0.5:
            chosen = [request_id for request_id in world.histories if rng.random() < 0.15]
            if chosen and draw < 0.1:
                chosen += ["unknown", chosen[0]]
            world.abort(chosen)
        elif draw < 0.75:
            world.set_pause(rng.choice(_PAUSES))
        elif draw < 0.95:
            world.reset(reset_running=draw < 0.9)
        else:
            self._lose_steps()

    def _lose_steps(self) -> None:
        """A step fails: half of the requests go on alone for a step, on few tokens, then the others again."""
        world = self.world
        world.lose_steps()
        world.check()
        world.restrict([request_id for request_id in world.histories if self._rng.random() < 0.5], 3)
        if world.launch().request_ids:
            world.finish_oldest()
        world.restrict(None)

    def _help(self) -> None:
        """End what holds up requests: pauses, blockers, sessions without input, blocks still being sent."""
        world, random = self.world, self._rng.random
        if world.pause is not PauseState.NONE:
            world.set_pause(PauseState.NONE)
        world.features.release_held()
        for request in world.unfinished:
            if request.status is RequestStatus.BLOCKED:
                if random() < 0.5:
                    self._unblock(request)
            elif request.is_resumable and random() < 0.1:
                self._extend(request)
            elif request.is_resumable and random() < 0.1:
                world.cancel_turn(request.request_id)

    def _unblock(self, request: Request) -> None:
        world, request_id = self.world, request.request_id
        if BLOCKER in request.blockers:
            world.unblock(request_id, BLOCKER)
        elif request_id in world.features.loading:
            world.receive(request_id)
        else:
            self._extend(request)

    def _extend(self, request: Request) -> None:
        turn = self._workload.draw_turn() if self._rng.random() < 0.7 else None
        if not self.world.extend(request.request_id, turn):
            self.world.extend(request.request_id, None)
