"""A frontend with its real accounts, policies and topology; its streams to engines are the simulation's."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.cluster_sim_engine import SimulatedRequest
from frontend_svc.engines.load_messages import load_of_engine
from frontend_svc.engines.routing.account import EngineAccount, LoadReport
from frontend_svc.engines.routing.engine_info import EngineInfo, RoutingRequest
from frontend_svc.engines.routing.policies import find_policy, route
from frontend_svc.engines.topology import Topology
from triptych.coordinator.v1 import coordinator_pb2


class DeltaReader:
    """Turns the loads of deltas into reports; frontends that get the same ones share the work of that."""

    def __init__(self) -> None:
        self._key: tuple[int, int, bytes] | None = None
        self._read: list[tuple[str, LoadReport]] = []

    def read(self, message: coordinator_pb2.FrontendSessionResponse) -> list[tuple[str, LoadReport]]:
        """The loads of a delta, by engine id."""
        loads = message.delta.loads
        key = (message.version, len(loads), loads[0].SerializeToString() if loads else b"")
        if key != self._key:
            self._key = key
            self._read = [(load.engine_id, load_of_engine(load)) for load in loads]
        return self._read


class SimulatedFrontend:
    """One frontend: what it knows of each engine, and which it picks."""

    def __init__(
        self, index: int, engine_ids: Sequence[str], endpoints: Sequence[str], policy: str, block_size: int
    ) -> None:
        self.index = index
        self.topology = Topology()
        self.in_flight: list[dict[int, SimulatedRequest]] = [{} for _ in engine_ids]
        self.take_s = 0.0  # of the messages taken in whole
        self.num_taken = 0
        self._indices = {engine_id: place for place, engine_id in enumerate(engine_ids)}
        self._places = {endpoint: place for place, endpoint in enumerate(endpoints)}
        self.accounts = [EngineAccount(engine_id) for engine_id in engine_ids]
        self.known_steps = [-1] * len(engine_ids)  # of the newest report that was taken
        for account in self.accounts:
            account.place(block_size=block_size)
        self._up = dict.fromkeys(range(len(engine_ids)))
        self._policy = find_policy(policy)
        # Each frontend begins at another engine, as `first_turn` has it on many hosts.
        self._turn = index * 7919

    def take(
        self,
        message: coordinator_pb2.FrontendSessionResponse,
        reader: DeltaReader,
        *,
        with_loads: bool = True,
    ) -> None:
        """A message of the coordinator arrives.

        The first frontend does all that a frontend does, so that its cost can be told; the others take over
        what `reader` has read of a delta that has nothing but loads.
        """
        delta = message.delta
        has_members = message.HasField("snapshot") or delta.added or delta.updated or delta.removed_engine_ids
        if self.index and not has_members:
            if with_loads:
                for engine_id, report in reader.read(message):
                    self._take_report(self._indices[engine_id], report, is_direct=False)
            return
        began = time.perf_counter()
        self.topology.apply(message)
        loads = self.topology.take_loads() if with_loads else {}
        for endpoint, known in loads.items():
            engine = self._places[endpoint]
            if known is None:
                self.accounts[engine].unreport()
            else:
                self._take_report(engine, known, is_direct=False)
        self.take_s += time.perf_counter() - began
        self.num_taken += 1

    def take_stats(self, engine: int, report: LoadReport) -> None:
        """An engine tells its load over its own stream."""
        self._take_report(engine, report, is_direct=True)

    def pick(self, request: SimulatedRequest) -> int | None:
        """The engine that gets a request, which is counted there from now on; None where none is up."""
        infos = self._infos()
        if not infos:
            return None
        asked = RoutingRequest(
            num_prompt_tokens=request.num_prompt_tokens + request.num_generated,
            prefix_hash=str(request.prefix_id).encode(),
        )
        picked = route(self._policy, infos, asked, self._turn)
        self._turn += 1
        if picked is None:
            return None
        engine = self._indices[picked.address]
        self.adopt(engine, request)
        return engine

    def adopt(self, engine: int, request: SimulatedRequest) -> None:
        """Count a request at an engine."""
        self.accounts[engine].send(request.request_id, request.num_prompt_tokens + request.num_generated)
        self.in_flight[engine][request.request_id] = request

    def begin(self, engine: int, request: SimulatedRequest) -> None:
        """A first token arrives."""
        self.accounts[engine].begin(request.request_id)

    def end(self, engine: int, request: SimulatedRequest) -> None:
        """A request has ended."""
        self.accounts[engine].end(request.request_id)
        self.in_flight[engine].pop(request.request_id, None)

    def lose(self, engine: int) -> list[SimulatedRequest]:
        """The stream to an engine is given up; returns the requests that have to go on elsewhere."""
        self._up.pop(engine, None)
        self.accounts[engine].reset()
        moved = list(self.in_flight[engine].values())
        self.in_flight[engine] = {}
        return moved

    def is_up(self, engine: int) -> bool:
        """Whether it would route there."""
        return engine in self._up

    def _take_report(self, engine: int, report: LoadReport, *, is_direct: bool) -> None:
        if engine in self._up and self.accounts[engine].report(report, is_direct=is_direct):
            self.known_steps[engine] = report.step_number

    def _infos(self) -> list[EngineInfo]:
        accounts = self.accounts
        return [accounts[engine].info() for engine in self._up]
