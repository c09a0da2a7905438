"""The pieces of the simulated cluster: virtual time, queues, traffic, and small clusters as a whole."""

from __future__ import annotations

import asyncio
import json
import math

import pytest

from benchmarks.cluster_sim import main, merge
from benchmarks.cluster_sim_engine import EngineShape, SimulatedEngine, SimulatedRequest
from benchmarks.cluster_sim_parts import imbalance, simulate
from benchmarks.cluster_sim_scenario import Scenario
from benchmarks.cluster_sim_time import Agenda, VirtualLoop
from benchmarks.cluster_sim_traffic import Traffic, TrafficShape, requests_per_s

SMALL = EngineShape(max_num_seqs=4, max_num_batched_tokens=64, num_blocks=16, block_size=16)


def request(prompt: int, outputs: int, *, request_id: int = 0, prefix: int = 0) -> SimulatedRequest:
    return SimulatedRequest(request_id, 0, 0.0, prompt, outputs, request_id, prefix)


def run_dry(engine: SimulatedEngine) -> list[SimulatedRequest]:
    finished: list[SimulatedRequest] = []
    for _ in range(10_000):
        if not engine.num_requests:
            return finished
        assert engine.begin_step() > 0
        finished += engine.end_step().finished
    raise AssertionError("the engine does not come to an end")


def test_a_task_and_the_agenda_share_one_time():
    agenda = Agenda()
    loop = VirtualLoop(agenda)
    seen: list[tuple[str, float]] = []

    async def task() -> None:
        for _ in range(2):
            await asyncio.sleep(10.0)
            seen.append(("task", loop.time()))

    agenda.at(15.0, lambda: seen.append(("agenda", agenda.now())))
    loop.run_until_complete(task())
    loop.close()
    assert seen == [("task", 10.0), ("agenda", 15.0), ("task", 20.0)]


def test_time_stands_still_until_a_woken_task_has_run():
    agenda = Agenda()
    loop = VirtualLoop(agenda)

    async def waiter() -> float:
        event = asyncio.Event()
        agenda.at(1.0, event.set)
        agenda.at(1.5, lambda: None)
        await event.wait()
        return loop.time()

    assert loop.run_until_complete(waiter()) == 1.0
    loop.close()


def test_a_task_that_nothing_can_wake_is_an_error():
    loop = VirtualLoop(Agenda())

    async def forever() -> None:
        await asyncio.Event().wait()

    task = loop.create_task(forever())
    with pytest.raises(RuntimeError, match="nothing is on the agenda"):
        loop.run_until_complete(task)
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


def test_a_prompt_is_computed_in_chunks_and_then_a_token_a_step():
    engine = SimulatedEngine(SMALL)
    one = request(100, 3)
    engine.add(one)
    firsts = []
    for _ in range(4):
        engine.begin_step()
        result = engine.end_step()
        firsts.append(len(result.first_tokens))
    assert firsts == [0, 1, 0, 0]
    assert result.finished == [one]
    assert one.num_generated == 3
    assert engine.num_used_blocks == 0


def test_no_more_requests_run_than_there_are_rows_for():
    engine = SimulatedEngine(SMALL)
    for number in range(6):
        engine.add(request(8, 5, request_id=number))
    engine.begin_step()
    assert (engine.num_running, engine.num_waiting, engine.num_waiting_tokens) == (4, 2, 16)


def test_a_short_pool_preempts_the_newest_and_all_requests_end():
    engine = SimulatedEngine(SMALL)
    requests = [request(60, 20, request_id=number) for number in range(4)]
    for one in requests:
        engine.add(one)
    finished = run_dry(engine)
    assert engine.num_preemptions > 0
    assert sorted(one.request_id for one in finished) == [0, 1, 2, 3]
    assert all(one.num_generated == 20 for one in finished)


def test_a_prefix_that_was_computed_before_is_a_hit():
    engine = SimulatedEngine(SMALL)
    for _ in range(2):
        engine.add(request(50, 1, request_id=7, prefix=32))
        run_dry(engine)
    assert (engine.num_prefix_tokens, engine.num_hit_tokens) == (64, 32)


def test_requests_that_are_asked_for_say_how_many_tokens_they_have():
    engine = SimulatedEngine(SMALL)
    engine.add(request(10, 9))
    for _ in range(3):
        engine.begin_step()
        engine.end_step()
    assert [one.num_generated for one in engine.requests()] == [3]
    assert [one.num_generated for one in engine.requests()] == [3]
    run_dry(engine)
    assert engine.num_used_blocks == 0


def test_traffic_is_the_same_for_the_same_seed_and_has_a_heavy_tail():
    drawn = [
        [traffic.request(0.0).num_prompt_tokens for _ in range(4000)]
        for traffic in (
            Traffic(TrafficShape(), num_engines=50, num_frontends=3, seed=5),
            Traffic(TrafficShape(), num_engines=50, num_frontends=3, seed=5),
        )
    ]
    assert drawn[0] == drawn[1]
    lengths = sorted(drawn[0])
    assert lengths[-1] > 10 * lengths[len(lengths) // 2]


def test_a_faster_engine_gets_more_done():
    slow, fast = EngineShape(), EngineShape(step_s=0.01, prompt_token_s=1e-5)
    assert requests_per_s(fast, TrafficShape()) > 1.5 * requests_per_s(slow, TrafficShape())


def test_a_cluster_serves_and_its_frontends_hear_of_loads_from_the_coordinator():
    scenario = Scenario(4, 2, end_s=3.0, warm_s=1.0, loads_from="coordinator")
    cluster, _ = simulate(scenario)
    assert sum(one.first_token_at is not None for one in cluster.observed.requests) > 20
    assert cluster.cost.num_published > 20
    ages = [age for at_s, age in cluster.observed.ages_s if at_s > 1.0]
    assert 0 < max(ages) < 0.5
    assert 1 <= imbalance(cluster, 1.0, 3.0) < math.inf


def test_the_same_scenario_gives_the_same_figures():
    runs = [simulate(Scenario(3, 2, end_s=2.0, warm_s=1.0, seed=3))[0] for _ in range(2)]
    assert runs[0].observed.samples == runs[1].observed.samples


@pytest.mark.parametrize(("is_cut_off", "least_s", "most_s"), [(True, 1.0, 2.0), (False, 0.0, 0.05)])
def test_frontends_leave_a_lost_engine_and_its_requests_go_on(is_cut_off, least_s, most_s):
    scenario = Scenario(8, 2, policy="p2c", end_s=5.0, lose_at_s=1.5, lost_part=0.25, is_cut_off=is_cut_off)
    cluster, _ = simulate(scenario)
    observed = cluster.observed
    assert observed.num_moves > 0
    last_after_s = (observed.last_pick_of_lost_at or 1.5) - 1.5
    assert least_s <= last_after_s <= most_s
    assert all(one.first_token_at is not None for one in observed.requests if one.arrived_at < 2.0)


def test_a_coordinator_that_comes_back_is_heard_again():
    scenario = Scenario(4, 2, end_s=8.0, warm_s=1.0, loads_from="coordinator", outage_at_s=1.5, outage_s=1.0)
    cluster, _ = simulate(scenario)
    assert len(cluster.coordinators) == 2
    late = [age for at_s, age in cluster.observed.ages_s if at_s > 7.0]
    assert max(late) < 0.5
    assert (
        cluster.frontends[0].topology.coordinator_epoch == cluster.coordinators[1].topology.coordinator_epoch
    )


def test_rows_of_a_part_that_was_run_again_replace_the_old_ones():
    old = [{"part": "route", "engines": 1, "frontends": 1, "policy": "a", "x": 1}]
    new = [{"part": "route", "engines": 1, "frontends": 1, "policy": policy, "x": 2} for policy in "ab"]
    assert [(row["policy"], row["x"]) for row in merge(old, new)] == [("a", 2), ("b", 2)]


def test_the_report_has_what_publishing_costs(tmp_path):
    path = tmp_path / "sim.json"
    main(["--parts", "publish", "--sizes", "3x2", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["messages_per_s"] == pytest.approx(20, rel=0.2)
    assert row["reports_per_s"] == pytest.approx(30, rel=0.2)
    assert row["coordinator_cpu_ms_per_s"] > 0
