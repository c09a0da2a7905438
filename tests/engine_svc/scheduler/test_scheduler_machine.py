"""Any order of the scheduler's verbs, over a runner that sees wrong blocks: invariants after every verb."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_svc.cache.attention import AttentionKind, ChunkedLocal, FullAttention, SlidingWindow
from engine_svc.cache.config import CacheConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import RepetitionLimits, SamplingParams
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from tests.simulation.alone import Turn
from tests.simulation.digest_model import EOS_TOKEN_ID, STOP_TOKEN_ID
from tests.simulation.setup import POLICIES, Setup
from tests.simulation.world import World

MAX_MODEL_LEN = 24
MAX_UNFINISHED = 16
MAX_STEPS_PER_REQUEST = 60
BLOCKER = "something"
GROUPS: tuple[tuple[AttentionKind, ...], ...] = (
    (FullAttention(2),),
    (FullAttention(4),),
    (SlidingWindow(2, 5),),
    (FullAttention(2), SlidingWindow(2, 3)),
    (FullAttention(4), SlidingWindow(2, 5)),
    (ChunkedLocal(2, 6), FullAttention(2)),
)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """A small engine of any shape, in which a request of full length fits when it is alone."""
    groups = draw(st.sampled_from(GROUPS))
    depth = draw(st.sampled_from((1, 2)))
    num_drafts = draw(st.sampled_from((0, 2)))
    chunked = draw(st.booleans())
    budget = draw(st.sampled_from((6, 20))) if chunked else MAX_MODEL_LEN
    has_drafter = num_drafts > 0 and draw(st.booleans())
    drops_last = has_drafter and not isinstance(groups[0], ChunkedLocal)
    longest, in_flight = MAX_MODEL_LEN + num_drafts, (budget + num_drafts) * depth
    num_alone = sum(kind.max_blocks(longest, in_flight) for kind in groups)
    return Setup(
        SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            max_num_seqs=draw(st.sampled_from((3, 6))),
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=draw(st.sampled_from((0, 3))),
            reserve_full_prompt=draw(st.booleans()),
            num_speculative_tokens=num_drafts,
            async_scheduling=depth > 1,
            max_steps_in_flight=depth,
        ),
        CacheConfig(
            num_blocks=1 + num_alone + draw(st.sampled_from((0, 3, num_alone))),
            groups=groups,
            enable_prefix_caching=draw(st.sampled_from((True, True, False))),
            num_lookahead_tokens=num_drafts if has_drafter else 0,
            drop_last_matched_block=drops_last,
        ),
        # A policy that gives prompts a part of a step has them enter in chunks.
        policy=draw(st.sampled_from(sorted(set(POLICIES) - (set() if chunked else {"prefill-first"})))),
        has_budget_watch=draw(st.booleans()),
        max_adapters=draw(st.sampled_from((0, 1))),
        max_encoder_tokens=0,
        arrival_rate=1.0,
        accident_rate=0.0,
        num_priorities=1,
        arrival_interval=1.0,
        has_sessions=True,
        has_senders=False,
        has_remote_loads=False,
        has_broken_rows=False,
    )


SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from((12, 8, 3, 1)),
    min_tokens=st.integers(0, 2),
    ignore_eos=st.booleans(),
    eos_token_id=st.just(EOS_TOKEN_ID),
    stop_token_ids=st.sampled_from((frozenset(), frozenset({STOP_TOKEN_ID}))),
    skip_reading_prefix_cache=st.sampled_from((False, False, True)),
    repetition=st.sampled_from((None, RepetitionLimits(2))),
)
# Few beginnings, so that requests share them.
PROMPTS = st.builds(
    lambda head, length, tail: [*([head] * length), *tail],
    st.integers(0, 1),
    st.sampled_from((8, 12, 4, 0)),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=3)


class SchedulerMachine(RuleBasedStateMachine):
    """An engine without a loop: steps are planned and finished whenever the machine likes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_added = 0

    @initialize(setup=setups(), seed=st.integers(0, 1 << 16))
    def build(self, setup: Setup, seed: int) -> None:
        """A core of any shape."""
        self.setup = setup
        self.world = World(setup, random.Random(seed))

    @precondition(lambda self: len(self.world.histories) < MAX_UNFINISHED)
    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=4),
        sampling=SAMPLINGS,
        priority=st.integers(0, 2),
        salt=st.sampled_from(("", "", "tenant")),
        adapter=st.sampled_from((None, None, "adapter-1", "adapter-2")),
        is_resumable=st.sampled_from((False, False, True)),
        is_blocked=st.sampled_from((False, False, True)),
    )
    def add(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams,
        priority: int,
        salt: str,
        adapter: str | None,
        is_resumable: bool,
        is_blocked: bool,
    ) -> None:
        """Requests come, the first of them the least urgent."""
        for place, prompt in enumerate(prompts):
            self.num_added += 1
            request = Request(
                f"r{self.num_added}",
                list(prompt),
                len(prompt),
                sampling,
                priority=priority - place,
                arrival_at=self.world.now,
                cache_salt=salt,
                extra_keys=() if adapter is None else (adapter,),
                is_resumable=is_resumable,
                blockers={BLOCKER} if is_blocked else set(),
            )
            self.world.add(request)

    @precondition(lambda self: len(self.world.in_flight) < self.setup.scheduler.max_steps_in_flight)
    @rule()
    def launch(self) -> None:
        """A step is planned and computed."""
        self.world.now += 1.0
        self.world.launch()

    @precondition(lambda self: self.world.in_flight)
    @rule()
    def finish_oldest(self) -> None:
        """Its result comes."""
        self.world.finish_oldest()

    @rule(num_steps=st.integers(4, 20))
    def steps(self, num_steps: int) -> None:
        """Some rounds of an engine's loop."""
        for _ in range(num_steps):
            self._step()

    @precondition(lambda self: self.world.histories)
    @rule(shares=SHARES)
    def abort(self, shares: list[float]) -> None:
        """Requests are ended from outside, some of them twice."""
        self.world.abort([self._any(share).request_id for share in shares])

    @precondition(lambda self: self.world.histories)
    @rule(share=st.floats(0, 1))
    def unblock(self, share: float) -> None:
        """What a request waits for is there."""
        self.world.unblock(self._any(share).request_id, BLOCKER)

    @precondition(lambda self: any(request.is_resumable for request in self.world.unfinished))
    @rule(share=st.floats(0, 1), token_ids=st.lists(st.integers(0, 2), max_size=4), sampling=SAMPLINGS)
    def extend(self, share: float, token_ids: list[int], sampling: SamplingParams) -> None:
        """A session goes on, or is told that it will not."""
        open_requests = [request for request in self.world.unfinished if request.is_resumable]
        chosen = open_requests[int(share * (len(open_requests) - 1))]
        self.world.extend(chosen.request_id, Turn(token_ids, sampling) if token_ids else None)

    @rule(state=st.sampled_from((*[PauseState.NONE] * 4, PauseState.NEW, PauseState.ALL)))
    def pause(self, state: PauseState) -> None:
        """Admissions, or all steps, are held back, or go on."""
        self.world.set_pause(state)

    @rule()
    def lose_steps(self) -> None:
        """Steps fail."""
        self.world.lose_steps()

    @precondition(lambda self: not self.world.in_flight)
    @rule(shares=SHARES, max_num_tokens=st.sampled_from((None, 1, 4)))
    def step_of_some(self, shares: list[float], max_num_tokens: int | None) -> None:
        """Only some requests may run in the next step."""
        some = [self._any(share).request_id for share in shares] if self.world.histories else []
        self.world.restrict(some, max_num_tokens)
        if self.world.launch().request_ids:
            self.world.finish_oldest()
        self.world.restrict(None)

    @rule(reset_running=st.sampled_from((False, False, True)))
    def reset(self, reset_running: bool) -> None:
        """Cached content is forgotten."""
        self.world.reset(reset_running=reset_running)

    @invariant()
    def everything_holds(self) -> None:
        """All invariants, over the whole state."""
        self.world.check()

    def teardown(self) -> None:
        """Whatever has happened, with nothing in their way all requests come to their end."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.set_pause(PauseState.NONE)
        for request in world.unfinished:
            world.unblock(request.request_id, BLOCKER)
            if request.is_resumable:
                world.extend(request.request_id, None)
        max_steps = world.num_steps + 1 + len(world.histories) * MAX_STEPS_PER_REQUEST
        while world.histories:
            assert world.num_steps < max_steps, "no end in sight"
            self._step()
        while world.in_flight:
            world.finish_oldest()
        world.check_idle()

    def _step(self) -> None:
        world, depth = self.world, self.setup.scheduler.max_steps_in_flight
        while len(world.in_flight) >= depth:
            world.finish_oldest()
        world.now += 1.0
        plan = world.launch()
        if world.in_flight and (len(world.in_flight) == depth or not plan.request_ids):
            world.finish_oldest()

    def _any(self, share: float) -> Request:
        unfinished = self.world.unfinished
        return unfinished[int(share * (len(unfinished) - 1))]


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
