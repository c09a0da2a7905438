"""Random workloads: nothing is lost, nobody starves, and every stream is what it would have been alone."""

from __future__ import annotations

import pytest

from engine_svc.request import FinishReason
from tests.simulation.simulation import Simulation


@pytest.mark.parametrize("seed", range(120))
def test_every_request_yields_what_it_would_have_yielded_alone(seed: int):
    simulation = Simulation(seed)
    simulation.run(num_requests=25)
    assert simulation.pool.num_free_blocks == simulation.pool.num_usable_blocks
    for request in simulation.requests:
        stream, expected = simulation.streams[request.request_id], simulation.expected_stream(request)
        assert stream == request.output_token_ids
        if simulation.finals[request.request_id] is FinishReason.ABORT:
            assert stream == expected[: len(stream)]
        else:
            assert stream == expected


def test_the_workloads_are_hard_enough():
    simulations = [Simulation(seed) for seed in range(30)]
    for simulation in simulations:
        simulation.run(num_requests=25)
    stats = [simulation.scheduler.stats() for simulation in simulations]
    assert sum(stat.num_preemptions for stat in stats) > 100
    assert sum(stat.num_chunked_prefills for stat in stats) > 50
    assert sum(stat.prefix_hits for stat in stats) > 100
    assert sum(simulation.overlaps for simulation in simulations) > 3
    assert sum(simulation.num_drafts > 0 for simulation in simulations) > 5
