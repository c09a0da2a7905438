"""The policy `fair`: what accounts get beside each other, and that one alone has what `fcfs` gives."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from engine_svc.core.request import Request
from engine_svc.core.step import StepPlan
from engine_svc.scheduler.feature import SchedulerFeature
from tests.engine_svc.scheduler.fakes import STOP, Stage, granted, request, segment, session


def of(account: str, name: str, num_tokens: int = 8, *, weight: int = 1, max_tokens: int = 100) -> Request:
    made = request(f"{account}-{name}", num_tokens, max_tokens=max_tokens, ignore_eos=True)
    made.account, made.weight = account, weight
    return made


class Load:
    """Accounts that keep a number of requests open, on a scheduler without a model."""

    def __init__(
        self,
        stage: Stage,
        open_requests: Mapping[str, int],
        weights: Mapping[str, int],
        factor: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """factor: of the length of an account's prompts."""
        self._factor = factor
        self._stage = stage
        self._wanted = dict(open_requests)
        self._weights = weights
        self._rng = random.Random(7)
        self._open = Counter[str]()
        self._num_made = 0
        self._added_at: dict[str, int] = {}
        self._num_steps = 0
        self.computed = Counter[str]()  # tokens, by account
        self.sampled = Counter[str]()
        self.num_preempted = Counter[str]()
        self.first_token_after: dict[str, list[int]] = {account: [] for account in open_requests}  # steps

    def keep(self, open_requests: Mapping[str, int]) -> None:
        """Change how many requests accounts keep open."""
        self._wanted.update(open_requests)

    def run(
        self, num_steps: int, prompt: tuple[int, int] = (8, 40), output: tuple[int, int] = (10, 60)
    ) -> None:
        rng = self._rng
        for _ in range(num_steps):
            for account, wanted in self._wanted.items():
                while self._open[account] < wanted:
                    made = of(
                        account,
                        str(self._num_made),
                        rng.randint(*prompt) * self._factor.get(account, 1),
                        weight=self._weights.get(account, 1),
                        max_tokens=rng.randint(*output),
                    )
                    self._num_made += 1
                    self._open[account] += 1
                    self._added_at[made.request_id] = self._num_steps
                    self._stage.add(made)
            self._step()

    def _step(self) -> None:
        plan = self._stage.schedule()
        for name, num_tokens in granted(plan).items():
            self.computed[_account(name)] += num_tokens
        self.num_preempted.update(map(_account, plan.preempted))
        for output in self._stage.update(plan):
            account = _account(output.request_id)
            self.sampled[account] += len(output.new_token_ids)
            if output.first is not None:
                waited = self._num_steps - self._added_at[output.request_id]
                self.first_token_after[account].append(waited)
            self._open[account] -= output.finish_reason is not None
        self._num_steps += 1


def _account(request_id: str) -> str:
    return request_id.partition("-")[0]


def _rows(plan: StepPlan) -> Counter[str]:
    return Counter(map(_account, plan.request_ids))


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 1, "b": 3}, {"a": 5, "b": 1}], ids=str)
@pytest.mark.parametrize("num_blocks", [4000, 90], ids=["rows are scarce", "blocks are scarce"])
def test_accounts_that_want_all_get_shares_by_weight(weights: dict[str, int], num_blocks: int):
    stage = Stage(policy="fair", max_num_seqs=32, num_blocks=num_blocks)
    load = Load(stage, {"a": 100, "b": 100}, weights)
    load.run(4000)
    share = load.sampled["b"] / load.sampled.total()
    assert share == pytest.approx(weights["b"] / sum(weights.values()), rel=0.05)


@pytest.mark.parametrize(("factor", "output"), [(6, (10, 60)), (40, (1, 5))])
def test_requests_of_other_sizes_do_not_change_shares(factor: int, output: tuple[int, int]):
    stage = Stage(policy="fair", max_num_seqs=32, num_blocks=4000, max_num_batched_tokens=256)
    load = Load(stage, {"long": 100, "short": 100}, {}, factor={"long": factor})
    load.run(1500, output=output)
    assert load.computed["short"] == pytest.approx(load.computed["long"], rel=0.05)


@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
def test_an_account_that_comes_is_served_in_the_next_step_beside_1400_requests(enable_chunked_prefill: bool):
    stage = Stage(
        policy="fair", max_num_seqs=64, num_blocks=4000, enable_chunked_prefill=enable_chunked_prefill
    )
    load = Load(stage, {"crowd": 1400, "one": 1}, {})
    load.run(600, output=(40, 40))
    assert set(load.first_token_after["one"]) == {0}
    # One row at a time is taken from the crowd, and only where none ends by itself.
    assert load.num_preempted["one"] == 0
    assert load.num_preempted["crowd"] <= len(load.first_token_after["one"])


def test_a_displaced_request_is_the_newest_and_goes_on_before_those_that_came_later():
    stage = Stage(policy="fair", max_num_seqs=3)
    stage.add(*(of("a", str(index)) for index in range(5)))
    stage.step()
    stage.add(of("b", "0", max_tokens=2))
    plan = stage.step()
    assert (plan.preempted, list(granted(plan))) == (["a-2"], ["a-0", "a-1", "b-0"])
    stage.step()
    assert list(granted(stage.step())) == ["a-0", "a-1", "a-2"]


def test_blocks_are_made_free_for_an_account_below_its_share():
    stage = Stage(policy="fair", num_blocks=13, block_size=16)
    stage.add(*(of("a", str(index), 40, max_tokens=8) for index in range(9)))
    assert _rows(stage.step()) == {"a": 4}
    stage.add(of("b", "0", 60, max_tokens=4))
    plan = stage.step()
    assert (plan.preempted, _rows(plan)) == (["a-3", "a-2"], {"a": 2, "b": 1})


def test_of_accounts_at_their_shares_none_displaces_another():
    stage = Stage(policy="fair", max_num_seqs=16, num_blocks=4000)
    stage.add(*(of("a", str(index), max_tokens=500) for index in range(60)))
    stage.step()
    stage.add(*(of("b", str(index), max_tokens=500) for index in range(60)))
    first = stage.step()
    assert (len(first.preempted), _rows(first)) == (8, {"a": 8, "b": 8})
    assert [plan.preempted for plan in (stage.step() for _ in range(400))] == [[]] * 400


def test_a_lack_of_blocks_preempts_the_newest_of_the_account_that_has_most():
    stage = Stage(policy="fair", num_blocks=8, block_size=4, max_model_len=32, reserve_full_prompt=False)
    stage.add(*(of("a", str(index), 4) for index in range(4)), of("b", "0", 4))
    # The five have a block each; in the next step each needs another, of which there are two.
    assert _rows(stage.step()) == {"a": 4, "b": 1}
    assert stage.step().preempted == ["a-3", "a-2"]


def test_no_account_starves_whatever_the_weights_of_others():
    stage = Stage(policy="fair", max_num_seqs=4, num_blocks=4000)
    load = Load(stage, {"heavy": 50, "light": 50}, {"heavy": 100})
    load.run(6000)
    assert len(load.first_token_after["light"]) >= 5
    assert load.computed["light"] / load.computed.total() == pytest.approx(1 / 101, abs=0.01)


def test_more_accounts_than_rows_all_get_their_turns():
    stage = Stage(policy="fair", max_num_seqs=4, num_blocks=4000)
    names = [f"account{index}" for index in range(12)]
    load = Load(stage, dict.fromkeys(names, 10), {})
    load.run(4000)
    mean = load.computed.total() / len(names)
    assert all(load.computed[name] == pytest.approx(mean, rel=0.1) for name in names)
    assert not load.num_preempted


def test_idling_saves_nothing_up():
    stage = Stage(policy="fair", max_num_seqs=8, num_blocks=4000)
    load = Load(stage, {"a": 40, "b": 40}, {})
    load.run(300)
    load.keep({"b": 0})
    load.run(600)
    before = load.computed.copy()
    load.keep({"b": 40})
    load.run(600)
    gained = load.computed - before
    assert gained["b"] / gained.total() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("crowd", [6, 40], ids=["rows are free", "rows are scarce"])
def test_requests_below_the_share_save_nothing_up(crowd: int):
    stage = Stage(policy="fair", max_num_seqs=8, num_blocks=4000)
    load = Load(stage, {"crowd": crowd, "modest": 1}, {})
    load.run(2000)
    load.keep({"crowd": 40, "modest": 40})
    before = load.computed.copy()
    load.run(600)
    gained = load.computed - before
    assert gained["modest"] / gained.total() == pytest.approx(0.5, abs=0.03)


def test_the_weight_is_that_of_the_newest_request():
    stage = Stage(policy="fair", max_num_seqs=8, num_blocks=4000)
    stage.add(*(of("a", str(index), max_tokens=500) for index in range(20)))
    stage.step()
    newest = of("a", "newest", weight=3)
    newest.arrival_at = 1.0
    stage.add(newest, *(of("b", str(index), max_tokens=500) for index in range(20)))
    assert _rows(stage.step()) == {"a": 6, "b": 2}
    # What is displaced came with the weight of before.
    stage.preempt_running()
    assert _rows(stage.step()) == {"a": 6, "b": 2}


def test_an_idle_session_is_no_account_that_competes():
    stage = Stage(policy="fair", max_num_seqs=2, num_blocks=4000)
    idle = session("idle-0", 8)
    idle.account = "idle"
    stage.add(idle)
    stage.step({"idle-0": [STOP]})
    stage.add(*(of("a", str(index)) for index in range(4)))
    for _ in range(50):
        assert _rows(stage.step()) == {"a": 2}
    stage.scheduler.extend("idle-0", segment(5, 6), stage.now)
    assert _rows(stage.step()) == {"a": 1, "idle": 1}


def test_long_prompts_leave_others_their_part_of_a_step():
    stage = Stage(policy="fair", max_num_batched_tokens=128, num_blocks=4000)
    stage.add(*(of("long", str(index), 1000) for index in range(3)))
    assert granted(stage.step()) == {"long-0": 128}
    stage.add(of("b", "0", 20), of("c", "0", 300, weight=2))
    # `b` needs 20 of its 32 tokens; the rest is divided one to two.
    assert granted(stage.step()) == {"long-0": 36, "b-0": 20, "c-0": 72}
    assert granted(stage.step()) == {"long-0": 43, "b-0": 1, "c-0": 84}


def test_prompts_of_one_account_alone_have_the_whole_step_beside_decodes_of_others():
    stage = Stage(policy="fair", max_num_batched_tokens=128, num_blocks=4000)
    stage.add(of("b", "0"))
    stage.step()
    stage.add(of("long", "0", 1000))
    assert granted(stage.step()) == {"b-0": 1, "long-0": 127}


def test_prompts_of_one_account_leave_a_token_to_each_decode_of_others():
    stage = Stage(policy="fair", max_num_batched_tokens=128, num_blocks=4000)
    stage.add(of("long", "0", 1000), of("b", "0", 20))
    assert granted(stage.step()) == {"long-0": 108, "b-0": 20}
    assert granted(stage.step()) == {"long-0": 127, "b-0": 1}


def test_prompts_that_have_no_row_take_no_part_of_a_step():
    stage = Stage(policy="fair", max_num_batched_tokens=512, max_num_seqs=4, num_blocks=4000)
    stage.add(*(of(f"account{index}", "0", 100) for index in range(50)))
    assert list(granted(stage.step()).values()) == [100] * 4


class Gate(SchedulerFeature):
    """A budget that admits requests of the account `b` while it is open."""

    def __init__(self) -> None:
        self.budget = self
        self.is_open = False

    def on_add(self, request: Request) -> None:
        request.num_budgets += request.account == "b"

    def begin_step(self) -> None: ...

    def admits(self, request: Request) -> bool:
        return self.is_open

    def clip(self, request: Request, num_tokens: int) -> int:
        return num_tokens

    def take(self, request: Request, num_tokens: int) -> None: ...

    def give_back(self, request: Request, num_tokens: int) -> None: ...


def test_a_prompt_that_a_feature_does_not_admit_takes_a_part_of_few_steps():
    gate = Gate()
    stage = Stage(policy="fair", max_num_batched_tokens=64, features=[gate])
    stage.add(of("b", "0", 100), of("a", "0", 1500))
    parts = [granted(stage.step())["a-0"] for _ in range(6)]
    assert parts == [32, *[64] * 4, 32]
    gate.is_open = True
    assert [granted(stage.step()).get("b-0") for _ in range(5)] == [*[None] * 4, 32]


@pytest.mark.parametrize(
    ("num_tokens", "num_steps", "preempted"),
    [(900, 1, "a-0"), (500, 10, "b-0")],
    ids=["the rest of a preempted prompt counts", "what is computed again does not"],
)
def test_each_token_of_a_preempted_request_counts_once(num_tokens: int, num_steps: int, preempted: str):
    stage = Stage(policy="fair", max_num_batched_tokens=128, max_num_seqs=2, enable_prefix_caching=False)
    stage.add(of("a", "0", num_tokens, max_tokens=1 + num_steps), of("b", "0", 300))
    stage.add(of("a", "1"), of("b", "1"))
    for _ in range(num_steps):
        stage.step()
    stage.scheduler.restrict({"a-0", "b-0"} - {preempted}, stage.now)
    stage.scheduler.restrict(None, stage.now)
    while "a-0" in stage.scheduler.running_ids + stage.scheduler.waiting_ids:
        stage.step()
    # `b` has used less, also with what its row counts ahead.
    assert list(granted(stage.step())) == ["b-0", "b-1"]


@pytest.mark.parametrize("seed", range(12))
def test_one_account_is_served_exactly_as_by_fcfs(seed: int):
    plans = {policy: _random_run(policy, seed, num_accounts=1) for policy in ("fcfs", "fair")}
    assert any(plan.preempted for plan in plans["fcfs"])
    assert plans["fair"] == plans["fcfs"]


@pytest.mark.parametrize("seed", range(4))
def test_the_same_requests_give_the_same_plans(seed: int):
    assert _random_run("fair", seed, num_accounts=3) == _random_run("fair", seed, num_accounts=3)


def _random_run(policy: str, seed: int, *, num_accounts: int) -> list[StepPlan]:
    """The plans of random requests that do not fit at once, some of which are aborted."""
    rng = random.Random(seed)
    overlaps = seed % 3 == 0
    stage = Stage(
        policy=policy,
        num_blocks=40,
        block_size=4,
        max_model_len=96,
        max_num_seqs=rng.choice((4, 12)),
        max_num_batched_tokens=rng.choice((16, 100)),
        enable_prefix_caching=rng.random() < 0.5,
        reserve_full_prompt=rng.random() < 0.5,
        num_speculative_tokens=rng.choice((0, 2)),
        async_scheduling=overlaps,
    )
    plans: list[StepPlan] = []
    in_flight: list[StepPlan] = []
    alive: list[str] = []
    for number in range(300):
        if number < 150 and rng.random() < 0.5:
            account = f"account{rng.randrange(num_accounts)}"
            added = of(account, str(number), rng.randint(1, 40), max_tokens=rng.randint(1, 40))
            alive.append(added.request_id)
            stage.add(added)
        if alive and rng.random() < 0.05:
            stage.scheduler.abort([alive.pop(rng.randrange(len(alive)))], stage.now)
        plan = stage.schedule()
        plans.append(plan)
        if plan.request_ids:
            in_flight.append(plan)
        if in_flight and (len(in_flight) > overlaps or not plan.request_ids):
            stage.update(in_flight.pop(0))
    return plans
