"""Which engine a policy picks by what there is to do, case by case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from importlib import metadata

import pytest

from frontend_svc.engines.routing.account import EngineAccount, LoadReport
from frontend_svc.engines.routing.affinity import by_preference, favourite, prefix_affinity, prefix_hash
from frontend_svc.engines.routing.engine_info import EngineInfo, RoutingPolicy, RoutingRequest
from frontend_svc.engines.routing.least_loaded import kv_aware, load, p2c, round_robin, work
from frontend_svc.engines.routing.policies import DEFAULT_POLICY, POLICIES, find_policy, first_turn, route

ANY = RoutingRequest(num_prompt_tokens=16)
NUM_BLOCKS = 1000
LEAST_LOADED = (load, kv_aware)


def engine(name: str, waiting: int = 0, running: int = 0, usage: float = 0.0, **facts: int) -> EngineInfo:
    return EngineInfo(
        name,
        num_waiting=waiting,
        num_running=running,
        num_used_blocks=round(usage * NUM_BLOCKS),
        num_total_blocks=NUM_BLOCKS,
        **facts,
    )


def accounts_of(num_engines: int) -> list[EngineAccount]:
    return [EngineAccount(f"h:{index}") for index in range(num_engines)]


def burst(
    accounts: list[EngineAccount], num_requests: int, policy: RoutingPolicy, *, first: int = 0
) -> list[int]:
    """Route so many requests, none of which ends; how many each engine has then."""
    for turn in range(first, first + num_requests):
        infos = [account.info() for account in accounts]
        accounts[infos.index(policy(infos, ANY, turn))].send(turn, ANY.num_prompt_tokens)
    return [account.num_in_flight for account in accounts]


@pytest.mark.parametrize(
    ("policy", "loads", "expected"),
    [
        (load, ((5, 10, 0.0), (0, 0, 0.0)), 1),
        (load, ((5, 10, 1.0), (0, 20, 0.2)), 1),
        (load, ((5, 10, 0.2), (0, 20, 0.2)), 1),
        (kv_aware, ((5, 10, 0.0), (0, 0, 0.0)), 1),
        (kv_aware, ((5, 10, 1.0), (0, 20, 0.2)), 1),
        (kv_aware, ((5, 10, 0.2), (0, 20, 0.2)), 0),
    ],
)
def test_waiting_running_and_kv_usage_decide_as_the_policy_says(policy, loads, expected):
    engines = [engine(str(index), *one) for index, one in enumerate(loads)]
    assert {policy(engines, ANY, turn) for turn in range(4)} == {engines[expected]}


@pytest.mark.parametrize("policy", LEAST_LOADED)
def test_four_requests_a_report_that_knows_nothing_and_four_more_leave_two_at_each_of_four(policy):
    accounts = accounts_of(4)
    assert burst(accounts, 4, policy) == [1, 1, 1, 1]
    for account in accounts:
        account.report(LoadReport(), is_direct=True)
    assert burst(accounts, 4, policy, first=4) == [2, 2, 2, 2]


@pytest.mark.parametrize("policy", LEAST_LOADED)
@pytest.mark.parametrize("first", range(5))
def test_a_burst_of_eight_over_four_idle_engines_gives_two_to_each(policy, first):
    assert burst(accounts_of(4), 8, policy, first=first) == [2, 2, 2, 2]


@pytest.mark.parametrize("policy", LEAST_LOADED)
def test_a_request_that_has_ended_counts_no_more(policy):
    accounts = accounts_of(2)
    burst(accounts, 4, policy)
    for handle in range(4):
        if handle % 2:
            accounts[1].end(handle)
    assert burst(accounts, 2, policy, first=4) == [2, 2]


@pytest.mark.parametrize("policy", [*LEAST_LOADED, round_robin])
def test_four_frontends_with_starts_of_their_own_pick_four_engines_first(policy):
    engines = [engine(name) for name in "abcd"]
    assert len({policy(engines, ANY, 1000 + index) for index in range(4)}) == 4


@pytest.mark.parametrize("policy", LEAST_LOADED)
def test_only_equals_take_turns(policy):
    engines = [engine("a"), engine("b", 1, 1), engine("c")]
    assert [policy(engines, ANY, turn).address for turn in range(4)] == ["a", "c", "a", "c"]


def test_a_long_prompt_weighs_as_many_short_ones():
    engines = [engine("long", num_unreported=1, num_unreported_tokens=800), engine("short", num_unreported=3)]
    assert kv_aware(engines, ANY, 0) is engines[1]
    assert load(engines, ANY, 0) is engines[0]


def test_a_prompt_that_runs_without_a_first_token_is_seen_though_nothing_waits():
    busy = engine("busy", 0, 1, num_in_flight=1, num_pending_tokens=5000)
    idle = engine("idle", 0, 3)
    assert kv_aware([busy, idle], ANY, 0) is idle


def test_blocks_are_scarce_for_a_long_prompt_first():
    engines = [engine("roomy", 0, 3, 0.1, block_size=16), engine("tight", 0, 2, 0.75, block_size=16)]
    assert kv_aware(engines, RoutingRequest(num_prompt_tokens=64), 0).address == "tight"
    assert kv_aware(engines, RoutingRequest(num_prompt_tokens=3000), 0).address == "roomy"


def test_an_engine_that_reports_no_blocks_is_taken_to_have_enough():
    without_blocks = EngineInfo("untold", num_running=3, num_used_blocks=7)
    assert work(without_blocks, ANY) == work(engine("known", 0, 3), ANY)


def test_round_robin_goes_round():
    engines = [engine(name, load) for name, load in (("a", 9), ("b", 0), ("c", 4))]
    assert [round_robin(engines, ANY, turn).address for turn in range(5)] == ["a", "b", "c", "a", "b"]


def test_two_choices_are_the_same_for_the_same_turn_and_take_the_one_with_less_work():
    engines = [engine(str(index), waiting=index) for index in range(8)]
    picks = [p2c(engines, ANY, turn).address for turn in range(4000)]
    assert picks == [p2c(engines, ANY, turn).address for turn in range(4000)]
    counts = Counter(picks)
    # The i-th least loaded of n is picked where both draws are no less loaded: 2 (n - i) / (n (n - 1)).
    for index in range(8):
        assert abs(counts[str(index)] / 4000 - 2 * (7 - index) / 56) < 0.03
    assert p2c(engines[:1], ANY, 7) is engines[0]


@pytest.mark.parametrize("policy", LEAST_LOADED)
def test_many_frontends_do_not_all_pick_the_one_that_is_the_least_loaded_of_all(policy):
    engines = [engine(str(index), running=5 + index % 7) for index in range(39)] + [engine("least")]
    picks = Counter(policy(engines, ANY, frontend * 720_720).address for frontend in range(40))
    assert picks["least"] >= 1 and max(picks.values()) <= 10
    # Each still picks the best of what it compares, where the mean of all is 7.8.
    loads = {one.address: one.num_running for one in engines}
    assert sum(loads[name] * count for name, count in picks.items()) / 40 < 6.5


@pytest.mark.parametrize("policy", LEAST_LOADED)
def test_a_frontend_whose_requests_are_all_there_are_picks_the_least_loaded_of_all(policy):
    engines = [engine(str(index), running=5, num_in_flight=4 if index == 23 else 5) for index in range(40)]
    engines[23] = engine("least", running=4, num_in_flight=4)
    assert {policy(engines, ANY, turn).address for turn in range(40)} == {"least"}


def test_without_any_report_imbalance_is_bounded_by_our_own_counts():
    """A coordinator that is away, and engines without reports: each gets what it ends, two at most more."""
    accounts = accounts_of(4)
    running: dict[int, int] = {}
    for turn in range(400):
        infos = [account.info() for account in accounts]
        at = infos.index(kv_aware(infos, ANY, turn))
        accounts[at].send(turn, ANY.num_prompt_tokens)
        accounts[at].begin(turn)
        running[turn] = at
        # The first engine is three times slower to end what it has.
        if turn % 3 == 2:
            for handle, engine_index in list(running.items()):
                if engine_index or turn % 9 == 8:
                    accounts[engine_index].end(handle)
                    del running[handle]
        counts = [account.num_in_flight for account in accounts]
        assert max(counts) - min(counts) <= 4
    assert max(counts) <= 4


# Which requests meet at one engine, what moves when an engine goes, and when a favourite is left.

MEMBERS = [EngineInfo(f"engine-{index}:50061", dp_rank=index) for index in range(8)]
KEYS = [b"session %d" % index for index in range(2000)]


def of_session(name: str = "s", prefix: bytes = b"") -> RoutingRequest:
    return RoutingRequest(num_prompt_tokens=100, session_id=name, prefix_hash=prefix)


def test_keys_spread_over_all_engines():
    counts = Counter(favourite(MEMBERS, key).address for key in KEYS)
    assert len(counts) == 8 and max(counts.values()) < 1.25 * len(KEYS) / 8


def test_an_engine_that_goes_moves_its_own_keys_alone_and_one_that_comes_takes_its_share():
    before = {key: favourite(MEMBERS, key) for key in KEYS}
    left = MEMBERS[:3] + MEMBERS[4:]
    for key, engine in before.items():
        after = favourite(left, key)
        assert after is engine or engine is MEMBERS[3]
        if engine is MEMBERS[3]:
            assert after is by_preference(MEMBERS, key)[1]


def test_the_order_in_which_engines_are_known_says_nothing():
    assert [favourite(MEMBERS, key) for key in KEYS] == [favourite(MEMBERS[::-1], key) for key in KEYS]


def test_a_session_stays_whatever_its_prompts_and_the_turn():
    picks = {prefix_affinity(MEMBERS, of_session(prefix=b"%d" % turn), turn).address for turn in range(50)}
    assert len(picks) == 1


def test_without_a_session_equal_first_blocks_meet_and_without_both_the_least_loaded_is_taken():
    picks = {prefix_affinity(MEMBERS, of_session("", b"blocks"), turn).address for turn in range(50)}
    assert len(picks) == 1
    idle = [replace(engine, num_running=5) for engine in MEMBERS[:3]] + [MEMBERS[-1]]
    assert prefix_affinity(idle, of_session(""), 3) is MEMBERS[-1]


def test_the_favourite_is_left_where_it_is_clearly_more_loaded_and_then_for_the_next_in_line():
    first, second = by_preference(MEMBERS, b"s")[:2]

    def pick(**load: int) -> str:
        engines = [replace(engine, **load) if engine is first else engine for engine in MEMBERS]
        return prefix_affinity(engines, of_session(), 0).address

    assert pick(num_running=3) == pick(num_waiting_tokens=900) == first.address
    assert pick(num_waiting_tokens=9000) == pick(num_waiting=40) == second.address


def test_all_engines_being_loaded_alike_moves_nothing():
    engines = [replace(engine, num_waiting=40, num_waiting_tokens=90_000) for engine in MEMBERS]
    assert prefix_affinity(engines, of_session(), 0).address == by_preference(MEMBERS, b"s")[0].address


def test_a_prefix_is_known_by_whole_steps_up_to_sixty_four_tokens():
    prompt = list(range(1, 200))
    assert prefix_hash(prompt[:15]) == b""
    assert prefix_hash(prompt[:16]) == prefix_hash(prompt[:31]) != prefix_hash(prompt[:32])
    assert prefix_hash(prompt[:64]) == prefix_hash(prompt) != prefix_hash(prompt[:63])
    assert prefix_hash([5, *prompt]) != prefix_hash(prompt)


# Policies by name, and what goes before each of them.

ENGINE_IDS = [EngineInfo(f"h:{index}", dp_rank=index) for index in range(4)]
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@every_policy
def test_no_engine_is_none(policy):
    assert route(policy, [], RoutingRequest(), 0) is None


@every_policy
def test_a_pinned_rank_goes_before_the_policy_and_one_that_is_not_there_is_none(policy):
    engines = [replace(ENGINE_IDS[0]), replace(ENGINE_IDS[1], num_waiting=50), *ENGINE_IDS[2:]]
    request = RoutingRequest(data_parallel_rank=1, session_id="s", affinity_key="k")
    assert {route(policy, engines, request, turn) for turn in range(8)} == {engines[1]}
    assert route(policy, engines, RoutingRequest(data_parallel_rank=4), 0) is None


@every_policy
def test_an_engine_that_is_held_gets_requests_only_where_all_are(policy):
    held = [replace(engine, is_held=True) for engine in ENGINE_IDS]
    for request in (RoutingRequest(session_id="s"), RoutingRequest(affinity_key="k")):
        picks = {route(policy, [*held[:3], ENGINE_IDS[3]], request, turn) for turn in range(16)}
        assert picks == {ENGINE_IDS[3]}
        assert route(policy, held, request, 0) in held


@every_policy
def test_an_engine_that_has_the_variant_in_a_slot_is_preferred_until_it_is_clearly_more_loaded(policy):
    engines = [replace(one, slots=frozenset({"aa", str(one.dp_rank)})) for one in ENGINE_IDS]
    request = RoutingRequest(num_prompt_tokens=100, slot="2")
    assert {route(policy, engines, request, turn) for turn in range(16)} == {engines[2]}
    for other in (RoutingRequest(slot="aa"), RoutingRequest(slot="none"), RoutingRequest()):
        prompts = [replace(other, prefix_hash=b"%d" % turn) for turn in range(64)]
        assert {route(policy, engines, one, turn) for turn, one in enumerate(prompts)} == set(engines)
    engines[2] = replace(engines[2], num_waiting_tokens=50_000)
    assert any(route(policy, engines, request, turn) is not engines[2] for turn in range(16))


@every_policy
def test_requests_with_the_same_affinity_key_meet_whatever_the_loads(policy):
    engines, picks = list(ENGINE_IDS), set()
    for turn in range(20):
        picked = route(policy, engines, RoutingRequest(affinity_key="query"), turn)
        assert picked is not None
        picks.add(picked.address)
        engines[picked.dp_rank] = replace(picked, num_waiting=picked.num_waiting + 100)
    assert len(picks) == 1


@every_policy
def test_a_session_stays_at_one_engine_until_that_is_clearly_more_loaded_than_the_least(policy):
    request = RoutingRequest(num_prompt_tokens=100, session_id="s")
    picks = {route(policy, ENGINE_IDS, request, turn) for turn in range(16)}
    assert len(picks) == 1
    (stays,) = picks
    assert stays is not None
    engines = [replace(one, num_waiting_tokens=50_000) if one is stays else one for one in ENGINE_IDS]
    assert route(policy, engines, request, 0) not in (stays, None)


def test_affinity_keys_spread():
    keys = map(str, range(64))
    picks = {route(find_policy("load"), ENGINE_IDS, RoutingRequest(affinity_key=key), 0) for key in keys}
    assert picks == set(ENGINE_IDS)


def test_frontends_of_one_host_begin_at_engines_of_their_own():
    firsts = {
        route(find_policy(DEFAULT_POLICY), ENGINE_IDS, RoutingRequest(), first_turn(index, 5**index))
        for index in range(4)
    }
    assert firsts == set(ENGINE_IDS)


def test_an_unknown_policy_is_refused_with_the_list_of_known_ones():
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
    assert route(find_policy("last"), ENGINE_IDS, RoutingRequest(), 0) is ENGINE_IDS[-1]
