"""Policies by name, and what goes before each of them."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import pytest

from frontend_svc.engines.routing.engine_info import EngineInfo, RoutingRequest
from frontend_svc.engines.routing.policies import DEFAULT_POLICY, POLICIES, find_policy, first_turn, route

ENGINES = [EngineInfo(f"h:{index}", dp_rank=index) for index in range(4)]
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@every_policy
def test_no_engine_is_none(policy):
    assert route(policy, [], RoutingRequest(), 0) is None


@every_policy
def test_a_pinned_rank_goes_before_the_policy_and_one_that_is_not_there_is_none(policy):
    engines = [replace(ENGINES[0]), replace(ENGINES[1], num_waiting=50), *ENGINES[2:]]
    request = RoutingRequest(data_parallel_rank=1, session_id="s", affinity_key="k")
    assert {route(policy, engines, request, turn) for turn in range(8)} == {engines[1]}
    assert route(policy, engines, RoutingRequest(data_parallel_rank=4), 0) is None


@every_policy
def test_an_engine_that_is_held_gets_requests_only_where_all_are(policy):
    held = [replace(engine, is_held=True) for engine in ENGINES]
    for request in (RoutingRequest(session_id="s"), RoutingRequest(affinity_key="k")):
        picks = {route(policy, [*held[:3], ENGINES[3]], request, turn) for turn in range(16)}
        assert picks == {ENGINES[3]}
        assert route(policy, held, request, 0) in held


@every_policy
def test_requests_with_the_same_affinity_key_meet_whatever_the_loads(policy):
    engines, picks = list(ENGINES), set()
    for turn in range(20):
        picked = route(policy, engines, RoutingRequest(affinity_key="query"), turn)
        assert picked is not None
        picks.add(picked.address)
        engines[picked.dp_rank] = replace(picked, num_waiting=picked.num_waiting + 100)
    assert len(picks) == 1


@every_policy
def test_a_session_stays_at_one_engine_until_that_is_clearly_more_loaded_than_the_least(policy):
    request = RoutingRequest(num_prompt_tokens=100, session_id="s")
    picks = {route(policy, ENGINES, request, turn) for turn in range(16)}
    assert len(picks) == 1
    (stays,) = picks
    assert stays is not None
    engines = [replace(one, num_waiting_tokens=50_000) if one is stays else one for one in ENGINES]
    assert route(policy, engines, request, 0) not in (stays, None)


def test_affinity_keys_spread():
    picks = {route(find_policy("load"), ENGINES, RoutingRequest(affinity_key=str(i)), 0) for i in range(64)}
    assert picks == set(ENGINES)


def test_frontends_of_one_host_begin_at_engines_of_their_own():
    firsts = {
        route(find_policy(DEFAULT_POLICY), ENGINES, RoutingRequest(), first_turn(index, 5**index))
        for index in range(4)
    }
    assert firsts == set(ENGINES)


def test_a_policy_that_nobody_offers_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"routing_policy is 'fastest'.*kv-aware, load, p2c"):
        find_policy("fastest")


def test_an_installed_package_offers_a_policy_by_its_entry_point(tmp_path, monkeypatch):
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[triptych.routing]\nlast = last_engine:pick\n")
    (tmp_path / "last_engine.py").write_text("def pick(engines, request, turn):\n    return engines[-1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "last" in metadata.entry_points(group="triptych.routing").names
    assert route(find_policy("last"), ENGINES, RoutingRequest(), 0) is ENGINES[-1]
