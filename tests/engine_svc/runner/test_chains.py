"""A feature that prepares, reads tokens on the host and masks, through the loop."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import FinishReason, Request
from engine_svc.core.step import StepPlan
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Abort, Add, Call, Inbox, Prepared, StatsSnapshot
from engine_svc.loop.preparation import Preparations
from engine_svc.loop.protocols import NoLockstep
from engine_svc.runner.executor import InlineExecutor, ThreadExecutor
from engine_svc.runner.feature import RunnerFeatures
from engine_svc.scheduler.config import SchedulerConfig
from tests.engine_svc.fakes import LIMIT_S
from tests.engine_svc.loop.frontend import Frontend
from tests.engine_svc.model.checkpoints import MAX_POSITION
from tests.engine_svc.request_options import split_options
from tests.engine_svc.runner.chains import Chain, ChainRows
from tests.engine_svc.runner.conftest import BLOCK_SIZE, TinyModel
from tests.engine_svc.runner.test_model_runner import prompt_of
from triptych_kit.clock import FakeClock

NUM_TOKENS = 16
WAYS = [(False, 1), (True, 1), (True, 2)]


@dataclass
class Rig:
    """An engine over a tiny model; the test runs each turn."""

    model: TinyModel
    is_beside: bool = False
    depth: int = 1
    num_blocks: int = 128
    max_num_batched_tokens: int = 24
    frontend: Frontend = field(default_factory=Frontend)
    requests: dict[int, Request] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens, self.ends = self.frontend.tokens, self.frontend.end_of
        self.feature = ChainRows(self.model.ours.facts.vocab_size)
        self.inbox = Inbox(100)
        self.answered = threading.Event()

        def on_prepared(number: int, failure: Exception | None) -> None:
            self.inbox.put(Prepared(number, failure))
            self.answered.set()

        runner = self.model.runner(features=(self.feature,), on_prepared=on_prepared)
        clock = FakeClock()
        self.preparations = Preparations(runner.preparer, clock)
        self.core = build_core(
            SchedulerConfig(
                max_model_len=MAX_POSITION,
                max_num_seqs=8,
                max_num_batched_tokens=self.max_num_batched_tokens,
                async_scheduling=self.depth > 1,
                max_steps_in_flight=self.depth,
            ),
            CacheConfig(self.num_blocks, (FullAttention(BLOCK_SIZE),)),
            features=[self.preparations],
        )
        self.executor = ThreadExecutor(runner) if self.is_beside else InlineExecutor(runner)
        launch = self.executor.launch

        def note(plan: StepPlan):
            self.plans.append(plan)
            return launch(plan)

        self.executor.launch = note  # type: ignore[method-assign]
        self.engine = Engine(
            scheduler=self.core.scheduler,
            executor=self.executor,
            inbox=self.inbox,
            stats_snapshot=StatsSnapshot(),
            clock=clock,
            lockstep=NoLockstep(),
            preparations=self.preparations,
            max_in_flight=self.depth,
            at_end=[self.preparations.close],
        )

    def add(
        self, handle: int, chain: Chain | None = None, *, output: tuple[int, ...] = (), **options
    ) -> None:
        sampling, extras = split_options(
            **{"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": handle} | options
        )
        if chain is not None:
            extras[Chain] = chain
        prompt = prompt_of(5 + 4 * handle, seed=handle)
        request = Request(
            f"r{handle}", [*prompt, *output], len(prompt), sampling, arrival_at=handle, extras=extras
        )
        self.requests[handle] = request
        self.tokens[handle] = []
        self.inbox.put(Add(request, self.frontend.outbox, handle))

    def run(self, num_ends: int) -> None:
        """Turns until so many requests have ended; waits for preparations if nothing else is to be done."""
        while len(self.ends) < num_ends:
            if not self.turn() and len(self.ends) < num_ends:
                assert self.answered.wait(LIMIT_S)
                self.answered.clear()

    def turn(self) -> bool:
        has_run = self.engine.turn()
        self.frontend.read_all()
        return has_run

    def close(self) -> None:
        self.feature.gate.set()
        self.engine.settle()
        self.engine.close()
        assert self.core.kv_cache.num_used_blocks == 0
        assert self.preparations.left_s() is None

    def keeps_chain(self, handle: int) -> bool:
        request = self.requests[handle]
        chain = request.extras[Chain]
        return chain.keeps(request.token_ids, request.num_prompt_tokens, self.feature.vocab_size)


_ALONE: dict[tuple[object, ...], list[int]] = {}


def alone(model: TinyModel, handle: int, chain: Chain | None, **options) -> list[int]:
    """The tokens of a request of which the engine has no other. Models live as long as all tests."""
    key = (id(model), handle, chain, *options.items())
    if key not in _ALONE:
        rig = Rig(model)
        rig.add(handle, chain, **options)
        rig.run(1)
        rig.close()
        _ALONE[key] = rig.tokens[handle]
    return _ALONE[key]


@pytest.mark.parametrize(
    ("is_beside", "depth", "model_impl"), [*((*way, "native") for way in WAYS), (True, 2, "transformers")]
)
def test_no_row_gets_a_token_that_its_chain_forbids(tiny_model, is_beside, depth, model_impl):
    model = tiny_model("llama", model_impl)
    rig = Rig(model, is_beside, depth)
    for handle in range(6):
        rig.add(handle, Chain(3 + handle) if handle % 2 else None, temperature=float(handle != 1))
    rig.run(6)
    rig.close()
    for handle in (1, 3, 5):
        assert len(rig.tokens[handle]) == NUM_TOKENS
        assert rig.keeps_chain(handle)
    # Nor do the chains change anything else, or anything else them.
    for handle in range(6):
        chain = Chain(3 + handle) if handle % 2 else None
        assert rig.tokens[handle] == alone(model, handle, chain, temperature=float(handle != 1))


@pytest.mark.parametrize(("is_beside", "depth"), WAYS)
def test_rows_that_are_preempted_lose_no_token(tiny_model, is_beside, depth):
    model = tiny_model("llama", "native")
    rig = Rig(model, is_beside, depth, num_blocks=44, max_num_batched_tokens=5)
    for handle in range(6):
        rig.add(handle, Chain(3) if handle % 3 else None, max_tokens=40)
    rig.run(6)
    rig.close()
    assert sum(rig.requests[handle].num_preemptions for handle in (1, 2, 4, 5)) > 0
    for handle in range(6):
        chain = Chain(3) if handle % 3 else None
        assert rig.tokens[handle] == alone(model, handle, chain, max_tokens=40), handle
        assert chain is None or rig.keeps_chain(handle)


def test_rows_that_pass_steps_get_their_tokens_later(tiny_model):
    model = tiny_model("llama", "native")
    feature = ChainRows(model.ours.facts.vocab_size)
    driver = model.driver(features=(feature,))
    for name in ("a", "b", "c"):
        # Without a blocker there is nothing to prepare.
        driver.add(name, prompt_of(9, seed=1)).extras[Chain] = Chain(3, blocker="")
    driver.step({"a": 9, "b": 4, "c": 9})
    for names in ("ab", "b", "a", "c", "ab", "ba"):
        driver.step({name: driver.requests[name].num_pending_tokens for name in names})
    # A chunk of a prompt does not sample; tokens of others come with the next row that does.
    assert feature.calls == [(0, 2), (2, 2), (2, 1), (1, 1), (1, 1), (1, 2), (2, 2)]
    driver.finish("a")
    driver.add("d", prompt_of(5, seed=2)).extras[Chain] = Chain(2, blocker="")
    driver.step({"d": 5, "b": 1})
    # Not that of the row that left, which another has now.
    assert feature.calls[-1] == (1, 2)
    for request in driver.requests.values():
        assert request.extras[Chain].keeps(request.token_ids, request.num_prompt_tokens, feature.vocab_size)


def test_what_was_not_prepared_ends_its_row(tiny_model):
    model = tiny_model("llama", "native")
    driver = model.driver(features=(ChainRows(model.ours.facts.vocab_size),))
    driver.add("a", prompt_of(9, seed=1)).extras[Chain] = Chain(3)
    assert driver.step({"a": 9}).failed == {0: "ChainRows failed: RuntimeError: Chain was not prepared"}


def test_an_example_is_prepared_as_well():
    class WithExample(ChainRows):
        def example(self) -> Chain:
            return Chain(7)

    assert RunnerFeatures([WithExample(32), ChainRows(32)], max_num_seqs=4).examples() == {Chain: 7}


def test_a_request_that_another_engine_began_goes_on_as_there(tiny_model):
    model = tiny_model("llama", "native")
    whole = alone(model, 2, Chain(5))
    rig = Rig(model)
    rig.add(2, Chain(5), output=tuple(whole[:7]))
    rig.run(1)
    rig.close()
    assert rig.tokens[2] == whole[7:]


def test_steps_and_engines_without_such_rows_do_not_call_the_feature(tiny_model):
    rig = Rig(tiny_model("llama", "native"), True, 2)
    rig.add(0)
    rig.add(1)
    rig.run(2)
    assert (rig.feature.calls, rig.feature.preparing_threads) == ([], set())
    rig.add(2, Chain(4), max_tokens=3)
    rig.run(3)
    rig.add(3)
    rig.run(4)
    rig.close()
    chained = [plan for plan in rig.plans if "r2" in plan.request_ids]
    # Its first step has no token to report. A step that was launched when it ended is among them.
    assert rig.feature.calls == [(0, 1)] + [(1, 1)] * (len(chained) - 1)
    assert rig.feature.rows == {}


def test_preparing_is_never_in_the_thread_of_the_loop(tiny_model):
    rig = Rig(tiny_model("llama", "native"), True, 2)
    for handle in range(4):
        rig.add(handle, Chain(3))
    rig.run(4)
    rig.close()
    (thread,) = rig.feature.preparing_threads
    assert thread not in (threading.get_ident(), rig.executor._thread.ident)


def test_a_chain_that_cannot_be_prepared_ends_its_request_alone(tiny_model):
    model = tiny_model("llama", "native")
    rig = Rig(model)
    rig.add(0, Chain(3, "bad"))
    rig.add(1, Chain(3))
    rig.add(2)
    rig.run(3)
    rig.close()
    end = rig.ends[0]
    assert (end.reason, end.stop_token_id, end.code, end.message) == (
        FinishReason.ERROR,
        None,
        "INVALID_ARGUMENT",
        "the chain is bad",
    )
    assert all("r0" not in plan.request_ids for plan in rig.plans)
    assert rig.tokens[1] == alone(model, 1, Chain(3))


def test_a_chain_that_hangs_delays_no_other_and_can_be_aborted(tiny_model):
    rig = Rig(tiny_model("llama", "native"))
    rig.add(0, Chain(3, "hangs"))
    rig.add(1)
    rig.run(1)
    assert list(rig.ends) == [1]
    rig.inbox.put(Abort("r0"))
    rig.run(2)
    assert rig.ends[0].reason is FinishReason.ABORT
    # Others are prepared, though that one still hangs.
    rig.add(2, Chain(3))
    rig.run(3)
    assert rig.keeps_chain(2)
    rig.close()


@pytest.mark.parametrize(("is_beside", "depth"), WAYS)
def test_what_on_tokens_raises_ends_its_rows_and_no_others(tiny_model, is_beside, depth):
    model = tiny_model("llama", "native")
    rig = Rig(model, is_beside, depth)
    rig.feature.raises_for = 5 + 4 + 6
    rig.add(1, Chain(3))
    rig.add(2)
    rig.run(2)
    rig.add(3, Chain(4))
    rig.run(3)
    rig.close()
    assert (rig.ends[1].reason, rig.ends[1].message) == (
        FinishReason.ERROR,
        "ChainRows failed: ValueError: no luck",
    )
    assert rig.tokens[1] == alone(model, 1, Chain(3))[:6]
    assert rig.tokens[2] == alone(model, 2, None)
    assert rig.tokens[3] == alone(model, 3, Chain(4))


@pytest.mark.parametrize(("is_beside", "depth"), WAYS)
def test_a_row_that_cannot_go_on_ends_alone_with_its_reason(tiny_model, is_beside, depth):
    model = tiny_model("llama", "native")
    rig = Rig(model, is_beside, depth)
    rig.feature.ends_at = 5 + 4 + 6
    rig.add(1, Chain(3))
    rig.add(3, Chain(3))
    rig.run(2)
    rig.close()
    assert (rig.ends[1].reason, rig.ends[1].message) == (FinishReason.ERROR, "the chain ends here")
    assert rig.tokens[1] == alone(model, 1, Chain(3))[:6]
    assert rig.tokens[3] == alone(model, 3, Chain(3))


def test_steps_that_are_rolled_back_leave_no_token_behind(tiny_model):
    model = tiny_model("llama", "native")
    rig = Rig(model, True, 2)
    for handle in (1, 2):
        rig.add(handle, Chain(3))
    while len(rig.tokens[1]) < 5:
        rig.turn()

    def roll_back() -> None:
        rig.executor.drop()
        rig.engine._steps.drop()
        rig.core.scheduler.withdraw(0.0)

    rig.inbox.put(Call(roll_back))
    rig.run(2)
    rig.close()
    assert [rig.tokens[handle] for handle in (1, 2)] == [alone(model, handle, Chain(3)) for handle in (1, 2)]
