"""Engines, frontends and a coordinator in one virtual time: requests, reports, losses, measurements."""

from __future__ import annotations

import asyncio
import random

from benchmarks.cluster_sim_coordinator import Inbox, SimulatedCoordinator
from benchmarks.cluster_sim_engine import EngineShape, SimulatedEngine, SimulatedRequest
from benchmarks.cluster_sim_frontend import DeltaReader, SimulatedFrontend
from benchmarks.cluster_sim_scenario import Cost, Observed, Scenario
from benchmarks.cluster_sim_time import Agenda
from benchmarks.cluster_sim_traffic import Traffic, requests_per_s
from frontend_svc.engines.connection.stream import HEARTBEAT_S
from frontend_svc.engines.routing.account import LoadReport
from triptych.coordinator.v1 import coordinator_pb2, member_pb2

# As engine_svc/membership/membership.py has them: with work, and without.
_REPORT_INTERVAL_S = 0.1
_IDLE_INTERVAL_S = 0.5
_RENEW_AFTER_S = 1.0
_MAX_RETRY_S = 1.0
_SAMPLE_INTERVAL_S = 0.1
# What a frontend hears nothing of for three heartbeats, and cannot reach within half a second, is lost.
_MISSED_HEARTBEATS = 3
_ATTEMPT_S = 0.5
# Nanoseconds, as a coordinator takes them from the wall clock; later ones are newer.
_FIRST_EPOCH = 1_700_000_000_000_000_000


class _Place:
    """One engine's process: its queue, its session, its clockwork."""

    def __init__(self, index: int, shape: EngineShape, chance: random.Random) -> None:
        self.index = index
        self.engine_id = f"engine-{index}"
        self.endpoint = f"10.{index // 65536}.{index // 256 % 256}.{index % 256}:50061"
        self.epoch = chance.getrandbits(63) | 1
        self.queue = SimulatedEngine(shape)
        self.is_stepping = False
        self.is_lost = False
        self.inbox: Inbox[coordinator_pb2.EngineSessionRequest] | None = None
        self.seq = 0
        self.reported: LoadReport | None = None
        self.told: LoadReport | None = None  # over the streams
        self.quiet_s = 0.0
        self.interval_s = _REPORT_INTERVAL_S
        self.measured_at: dict[int, float] = {}


class Cluster:
    """One scenario under way. `run` on a VirtualLoop whose agenda it is given."""

    def __init__(self, scenario: Scenario, agenda: Agenda) -> None:
        self.observed = Observed()
        self.cost = Cost()
        self.coordinators: list[SimulatedCoordinator] = []
        self._scenario = scenario
        self._agenda = agenda
        self._random = random.Random(scenario.seed)
        self._probing = random.Random(scenario.seed + 1)
        self.places = [_Place(index, scenario.engine, self._random) for index in range(scenario.num_engines)]
        self.frontends = [
            SimulatedFrontend(
                index,
                [place.engine_id for place in self.places],
                [place.endpoint for place in self.places],
                scenario.policy,
                scenario.engine.block_size,
            )
            for index in range(scenario.num_frontends)
        ]
        self._reader = DeltaReader()
        self._traffic = Traffic(
            scenario.traffic,
            num_engines=scenario.num_engines,
            num_frontends=scenario.num_frontends,
            seed=scenario.seed,
        )
        self.requests_per_s = (
            requests_per_s(scenario.engine, scenario.traffic)
            * scenario.traffic.utilization
            * scenario.num_engines
        )
        self._gaps = self._traffic.gaps(self.requests_per_s)

    async def run(self) -> None:
        """Let the scenario pass."""
        scenario, agenda = self._scenario, self._agenda
        self._start_coordinator()
        for place in self.places:
            agenda.after(self._random.uniform(0, _REPORT_INTERVAL_S), self._report, place)
            if scenario.loads_from != "coordinator":
                agenda.after(self._random.uniform(0, HEARTBEAT_S), self._tell_streams, place)
        if scenario.with_requests:
            self._warm_up()
            agenda.after(next(self._gaps), self._arrive)
        agenda.after(_SAMPLE_INTERVAL_S, self._sample)
        agenda.after(0.0, self._probe)
        if scenario.lose_at_s is not None:
            agenda.at(scenario.lose_at_s, self._lose_engines)
        if scenario.outage_at_s is not None:
            agenda.at(scenario.outage_at_s, self._stop_coordinator)
            agenda.at(scenario.outage_at_s + scenario.outage_s, self._start_coordinator)
        await asyncio.sleep(scenario.warm_s)
        before = self._counted()
        await asyncio.sleep(scenario.end_s - scenario.warm_s)
        self.cost = self._counted() - before
        await self.coordinators[-1].close()

    def _counted(self) -> Cost:
        coordinators = self.coordinators
        return Cost(
            seconds=self._agenda.now(),
            cpu_s=self._agenda.spent() - self._agenda.own_cpu_s,
            num_published=sum(one.num_published for one in coordinators),
            published_bytes=sum(one.published_bytes for one in coordinators),
            num_loads=sum(one.num_loads for one in coordinators),
            num_reports=sum(one.num_reports for one in coordinators),
            reported_bytes=sum(one.reported_bytes for one in coordinators),
        )

    # Requests.

    def _warm_up(self) -> None:
        """Begin as a cluster that has been running: with requests of which a part is done, evenly spread."""
        shape = self._scenario.engine
        num_each = int(self._scenario.traffic.utilization * shape.max_num_seqs / 4)
        for _ in range(num_each):
            for place in self.places:
                request = self._traffic.request(0.0)
                request.num_output_tokens = self._random.randint(1, request.num_output_tokens)
                frontend = self.frontends[request.frontend]
                frontend.adopt(place.index, request)
                request.engine = place.index
                self._enqueue(place, request)

    def _arrive(self) -> None:
        request = self._traffic.request(self._agenda.now())
        self.observed.requests.append(request)
        self._send(request)
        self._agenda.after(next(self._gaps), self._arrive)

    def _send(self, request: SimulatedRequest) -> None:
        engine = self.frontends[request.frontend].pick(request)
        assert engine is not None, "no scenario loses all engines"
        request.engine = engine
        place = self.places[engine]
        if place.is_lost:
            self.observed.last_pick_of_lost_at = self._agenda.now()
            self.observed.num_picks_of_lost += 1
        self._agenda.after(self._delay_s(), self._enqueue, place, request)

    def _enqueue(self, place: _Place, request: SimulatedRequest) -> None:
        if place.is_lost or request.engine != place.index:
            return
        place.queue.add(request)
        if not place.is_stepping:
            place.is_stepping = True
            self._agenda.after(place.queue.begin_step(), self._step, place)

    def _step(self, place: _Place) -> None:
        if place.is_lost:
            return
        result = place.queue.end_step()
        for request in result.first_tokens:
            self._agenda.after(self._delay_s(), self._first_token, place.index, request)
        for request in result.finished:
            self._agenda.after(self._delay_s(), self._finished, place.index, request)
        if place.queue.num_requests:
            self._agenda.after(place.queue.begin_step(), self._step, place)
        else:
            place.is_stepping = False

    def _first_token(self, engine: int, request: SimulatedRequest) -> None:
        request.first_token_at = self._agenda.now()
        self.frontends[request.frontend].begin(engine, request)

    def _finished(self, engine: int, request: SimulatedRequest) -> None:
        self.frontends[request.frontend].end(engine, request)

    # Reports.

    def _facts(self, place: _Place) -> LoadReport:
        queue = place.queue
        if not self._scenario.with_requests:
            return self._made_up(place)
        return LoadReport(
            engine_epoch=place.epoch,
            step_number=queue.step_number,
            num_running=queue.num_running,
            num_waiting=queue.num_waiting,
            num_waiting_tokens=queue.num_waiting_tokens,
            num_used_blocks=queue.num_used_blocks,
            num_total_blocks=queue.shape.num_blocks,
        )

    def _made_up(self, place: _Place) -> LoadReport:
        place.queue.step_number += 1
        return LoadReport(
            engine_epoch=place.epoch,
            step_number=place.queue.step_number,
            num_running=self._random.randrange(64),
            num_waiting=self._random.randrange(8),
            num_waiting_tokens=self._random.randrange(20_000),
            num_used_blocks=self._random.randrange(10_000),
            num_total_blocks=place.queue.shape.num_blocks,
        )

    def _report(self, place: _Place) -> None:
        if place.is_lost:
            return
        facts = self._facts(place)
        has_work = place.queue.num_requests > 0 or not self._scenario.with_requests
        interval_s = place.interval_s if has_work else max(place.interval_s, _IDLE_INTERVAL_S)
        place.measured_at[facts.step_number] = self._agenda.now()
        if place.inbox is not None and (facts != place.reported or place.quiet_s >= _RENEW_AFTER_S):
            place.seq += 1
            message = _report_message(place, facts)
            if self._scenario.on_wire:
                data = message.SerializeToString()
                self.coordinators[-1].note_report(data)
                self._agenda.after(self._delay_s(), place.inbox.put, data)
            else:
                self._agenda.after(self._delay_s(), place.inbox.put, message)
            place.reported, place.quiet_s = facts, 0.0
        place.quiet_s += interval_s
        self._agenda.after(interval_s, self._report, place)

    def _tell_streams(self, place: _Place) -> None:
        if place.is_lost:
            return
        facts = self._facts(place)
        if facts != place.told:
            place.told = facts
            place.measured_at[facts.step_number] = self._agenda.now()
            self._agenda.after(self._delay_s(), self._take_stats, place.index, facts)
        self._agenda.after(HEARTBEAT_S, self._tell_streams, place)

    def _take_stats(self, engine: int, facts: LoadReport) -> None:
        for frontend in self.frontends:
            frontend.take_stats(engine, facts)

    # The coordinator.

    def _start_coordinator(self) -> None:
        is_first = not self.coordinators
        coordinator = SimulatedCoordinator(
            self._agenda, epoch=_FIRST_EPOCH + len(self.coordinators), on_wire=self._scenario.on_wire
        )
        self.coordinators.append(coordinator)
        retry_s = _REPORT_INTERVAL_S if is_first else _MAX_RETRY_S
        for place in self.places:
            self._agenda.after(self._random.uniform(0, retry_s), self._register, place, coordinator)
        for frontend in self.frontends:
            self._agenda.after(self._random.uniform(0, retry_s), self._subscribe, frontend, coordinator)

    def _stop_coordinator(self) -> None:
        self.coordinators[-1].stop()
        for place in self.places:
            place.inbox = None

    def _register(self, place: _Place, coordinator: SimulatedCoordinator) -> None:
        if place.is_lost:
            return
        place.interval_s = _REPORT_INTERVAL_S

        def obey(message: coordinator_pb2.EngineSessionResponse) -> None:
            if message.command.HasField("update_interval"):
                place.interval_s = message.command.update_interval.interval_ms / 1000

        place.inbox = coordinator.engine_session(obey)
        place.inbox.put(coordinator_pb2.EngineSessionRequest(register=_registration(place)))
        place.reported = None

    def _subscribe(self, frontend: SimulatedFrontend, coordinator: SimulatedCoordinator) -> None:
        def send(message: coordinator_pb2.FrontendSessionResponse) -> None:
            self._agenda.after(self._delay_s(), receive, message)

        def receive(message: coordinator_pb2.FrontendSessionResponse) -> None:
            if coordinator is not self.coordinators[-1]:
                return
            frontend.take(message, self._reader, with_loads=self._scenario.loads_from != "streams")
            ack = coordinator_pb2.FrontendAck(nonce=message.nonce, version=message.version)
            request = coordinator_pb2.FrontendSessionRequest(ack=ack)
            self._agenda.after(self._delay_s(), inbox.put, request)

        inbox = coordinator.frontend_session(send)
        registration = coordinator_pb2.FrontendRegistration(
            frontend_id=f"frontend-{self.frontends.index(frontend)}",
            frontend_epoch=7,
            known_version=frontend.topology.version,
            known_coordinator_epoch=frontend.topology.coordinator_epoch,
        )
        inbox.put(coordinator_pb2.FrontendSessionRequest(register=registration))

    # Losses.

    def _lose_engines(self) -> None:
        scenario = self._scenario
        lost = self._random.sample(self.places, max(1, round(scenario.lost_part * len(self.places))))
        for place in lost:
            place.is_lost = True
            # What they have got so far counts: it becomes part of their prompts elsewhere.
            place.queue.requests()
            if not scenario.is_cut_off and place.inbox is not None:
                self._agenda.after(self._delay_s(), place.inbox.end)
            for frontend in self.frontends:
                self._agenda.after(self._noticed_after_s(), self._notice, frontend, place)

    def _noticed_after_s(self) -> float:
        if not self._scenario.is_cut_off:
            return self._delay_s()
        # The last heartbeat came up to one interval before.
        return (_MISSED_HEARTBEATS - self._random.random()) * HEARTBEAT_S + _ATTEMPT_S

    def _notice(self, frontend: SimulatedFrontend, place: _Place) -> None:
        for request in frontend.lose(place.index):
            request.attempt += 1
            self.observed.num_moves += 1
            self._send(request)

    # Measurements.

    def _sample(self) -> None:
        now = self._agenda.now()
        loads = [place.queue.num_requests for place in self.places if not place.is_lost]
        self.observed.samples.append((now, max(loads), sum(loads) / len(loads)))
        self._agenda.after(_SAMPLE_INTERVAL_S, self._sample)

    def _probe(self) -> None:
        """Look at some loads that frontends hold, at moments that chance chooses."""
        now, chance = self._agenda.now(), self._probing
        for _ in range(4):
            frontend, place = chance.choice(self.frontends), chance.choice(self.places)
            measured_at = place.measured_at.get(frontend.known_steps[place.index])
            is_busy = place.queue.num_requests > 0 or not self._scenario.with_requests
            if is_busy and not place.is_lost and measured_at is not None:
                self.observed.ages_s.append((now, now - measured_at))
        self._agenda.after(chance.uniform(0.0, 0.05), self._probe)

    def _delay_s(self) -> float:
        """Of a message within a data centre: 0.2 ms, and a tail of some milliseconds."""
        return 2e-4 + self._random.expovariate(1 / 2e-4) + (0.002 if self._random.random() < 0.01 else 0.0)


def _registration(place: _Place) -> member_pb2.EngineRegistration:
    shape = place.queue.shape
    return member_pb2.EngineRegistration(
        engine_id=place.engine_id,
        engine_epoch=place.epoch,
        endpoint=place.endpoint,
        fingerprint="0123456789abcdef" * 4,
        model_name="a-model-of-30b",
        capacity=member_pb2.EngineCapacity(
            num_kv_blocks=shape.num_blocks,
            block_size=shape.block_size,
            max_num_seqs=shape.max_num_seqs,
            max_model_len=32_768,
        ),
    )


def _report_message(place: _Place, facts: LoadReport) -> coordinator_pb2.EngineSessionRequest:
    load = member_pb2.EngineLoad(
        engine_id=place.engine_id,
        engine_epoch=place.epoch,
        step_number=facts.step_number,
        num_running=facts.num_running,
        num_waiting=facts.num_waiting,
        num_waiting_tokens=facts.num_waiting_tokens,
        num_used_blocks=facts.num_used_blocks,
        num_total_blocks=facts.num_total_blocks,
    )
    report = coordinator_pb2.EngineReport(
        seq=place.seq, load=load, state=member_pb2.MEMBER_STATE_READY, step_number=facts.step_number
    )
    return coordinator_pb2.EngineSessionRequest(report=report)
