"""Every check of the simulator can fail: each is shown what it is there for."""

from __future__ import annotations

import random

import pytest

from engine_svc.cache.attention import (
    AttentionKind,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    KeptState,
    SlidingWindow,
)
from engine_svc.cache.block_pool import BlockPool, content_key
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import KVCache
from engine_svc.cache.observer import StoredBlocks
from engine_svc.core.request import BlockTable, FinishReason, FirstOutput, Request, RequestOutput
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest, StepPlan
from engine_svc.scheduler.config import PauseState, SchedulerConfig
from tests.simulation.alone import answers_alone
from tests.simulation.broken import BrokenInvariant
from tests.simulation.budgets import BudgetWatch
from tests.simulation.cache_watch import CacheWatch
from tests.simulation.campaign import Fault, Report
from tests.simulation.digest_model import Identity
from tests.simulation.history import History
from tests.simulation.invariants import (
    check_conservation,
    check_content,
    check_events,
    check_plan,
    check_states,
)
from tests.simulation.paged_runner import PagedRunner, first_read
from tests.simulation.setup import draw_setup
from tests.simulation.simulation import Simulation

SAMPLING = SamplingParams(max_tokens=4)
CONFIG = SchedulerConfig(max_model_len=32, max_num_batched_tokens=8, max_num_seqs=2)


def request(request_id: str = "a", *, adapter: str = "") -> Request:
    return Request(request_id, [3, 4, 5], 3, SAMPLING, extra_keys=(adapter,) if adapter else ())


def right_answer() -> list[int]:
    history = History(request())
    return next(answers_alone(history.identity, history.turns, 32)).token_ids


def output(tokens: list[int], reason: FinishReason | None, *, num_cached: int | None = None) -> RequestOutput:
    return RequestOutput("a", tokens, reason, first=None if num_cached is None else FirstOutput(num_cached))


def test_a_stream_as_it_would_be_alone_is_fine():
    history = History(request())
    tokens = right_answer()
    history.take(output(tokens[:1], None, num_cached=0))
    history.take(output(tokens[1:], FinishReason.LENGTH))
    history.check(32)


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([1, 1, 1, 1], FinishReason.LENGTH),
        (right_answer()[:-1], FinishReason.LENGTH),
        (right_answer(), FinishReason.STOP),
        (right_answer(), FinishReason.ABORT),
        ([99], FinishReason.ABORT),
    ],
    ids=[
        "other tokens",
        "a token less",
        "another reason",
        "ended twice over",
        "cut short behind other tokens",
    ],
)
def test_any_other_stream_is_noticed(tokens: list[int], reason: FinishReason):
    history = History(request())
    history.take(output(tokens, reason, num_cached=0))
    with pytest.raises(BrokenInvariant, match="isolation"):
        history.check(32)


@pytest.mark.parametrize(
    "late",
    [output([1], None), output([], FinishReason.ABORT), output([], FinishReason.LENGTH)],
    ids=["token", "abort", "second end"],
)
def test_nothing_comes_behind_the_last_output(late: RequestOutput):
    history = History(request())
    history.take(output([], FinishReason.ABORT, num_cached=0))
    with pytest.raises(BrokenInvariant, match="terminal-once"):
        history.take(late)


@pytest.mark.parametrize(
    "outputs",
    [
        [output([1], None)],
        [output([1], None, num_cached=0), output([1], None, num_cached=0)],
        [output([], None, num_cached=0)],
    ],
    ids=["cached tokens missing", "cached tokens reported twice", "nothing reported"],
)
def test_outputs_of_a_wrong_form_are_noticed(outputs: list[RequestOutput]):
    history = History(request())
    *fine, wrong = outputs
    for each in fine:
        history.take(each)
    with pytest.raises(BrokenInvariant, match="order"):
        history.take(wrong)


def cancelled(num_before: int, num_after: int, reason: FinishReason) -> History:
    """A turn that is cancelled after so many tokens, and ends so many later."""
    history, tokens = History(request()), right_answer()
    history.take(output(tokens[:num_before], None, num_cached=0))
    history.cancel()
    end = output(tokens[num_before : num_before + num_after], reason)
    end.continues = True
    history.take(end)
    return history


def test_a_cancelled_turn_ends_with_its_next_token():
    cancelled(1, 1, FinishReason.ABORT).check(32)
    cancelled(3, 1, FinishReason.LENGTH).check(32)
    with pytest.raises(BrokenInvariant, match="isolation"):
        cancelled(1, 2, FinishReason.ABORT).check(32)
    with pytest.raises(BrokenInvariant, match="order"):
        cancelled(2, 2, FinishReason.LENGTH).check(32)
    with pytest.raises(BrokenInvariant, match="isolation"):
        cancelled(3, 1, FinishReason.ABORT).check(32)


def test_a_turn_that_was_not_cancelled_does_not_end_by_abort():
    history = History(request())
    end = output(right_answer()[:1], FinishReason.ABORT, num_cached=0)
    end.continues = True
    with pytest.raises(BrokenInvariant, match="order"):
        history.take(end)


def test_a_block_that_is_unlisted_or_listed_wrongly_is_detected():
    pool = BlockPool(5)
    [held] = pool.allocate(1)
    holder = request()
    holder.block_tables = [BlockTable([held])]
    check_conservation(pool, [holder], [])
    with pytest.raises(BrokenInvariant, match="kv-conservation"):
        check_conservation(pool, [], [])
    with pytest.raises(BrokenInvariant, match="kv-conservation"):
        check_conservation(pool, [holder], [[held]])
    holder.block_tables = [BlockTable([held, 3])]
    with pytest.raises(BrokenInvariant, match="kv-conservation"):
        check_conservation(pool, [holder], [])


def test_content_and_hashes_go_together_one_to_one():
    hash_of: dict[int, bytes] = {}
    digest_of: dict[bytes, int] = {}
    check_content([b"x", b"y"], [1, 2, 3, 4], 2, hash_of, digest_of)
    check_content([b"x"], [1, 2, 9], 2, hash_of, digest_of)
    with pytest.raises(BrokenInvariant, match="same hash"):
        check_content([b"x"], [1, 5], 2, hash_of, digest_of)
    with pytest.raises(BrokenInvariant, match="two hashes"):
        check_content([b"z"], [1, 2], 2, hash_of, digest_of)


def test_events_have_to_tell_what_can_be_found():
    pool, watch = BlockPool(5), CacheWatch()
    block_hash = bytes(32)
    pool.register(pool.allocate(1), [block_hash])
    with pytest.raises(BrokenInvariant, match="hash-soundness"):
        check_events([pool], watch)
    watch.on_store(StoredBlocks([block_hash], b"", [1, 2], 2, 0))
    check_events([pool], watch)
    watch.on_evict(1, block_hash, 0)
    with pytest.raises(BrokenInvariant, match="hash-soundness"):
        watch.on_evict(1, block_hash, 0)


def plan(num_tokens: list[int], *, new_block_ids: list[list[list[int]]] | None = None) -> StepPlan:
    rows = range(len(num_tokens))
    return StepPlan(
        1,
        request_ids=[f"r{row}" for row in rows],
        num_tokens=num_tokens,
        num_computed_tokens=[0 for _ in rows],
        new_block_ids=new_block_ids or [[] for _ in rows],
        draft_token_ids=[[] for _ in rows],
        samples=[True for _ in rows],
    )


@pytest.mark.parametrize(
    ("wrong", "pause"),
    [
        (plan([9]), PauseState.NONE),
        (plan([5, 4]), PauseState.NONE),
        (plan([1, 1, 1]), PauseState.NONE),
        (plan([0]), PauseState.NONE),
        (plan([1]), PauseState.ALL),
        (plan([1, 1], new_block_ids=[[[1]], [[1]]]), PauseState.NONE),
        (plan([1], new_block_ids=[[[0]]]), PauseState.NONE),
        (plan([1], new_block_ids=[[[2]]]), PauseState.NONE),
    ],
    ids=[
        "over the budget",
        "over the budget together",
        "too many rows",
        "empty row",
        "while all is paused",
        "a block twice",
        "the placeholder",
        "a free block",
    ],
)
def test_a_plan_over_its_limits_is_noticed(wrong: StepPlan, pause: PauseState):
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(BrokenInvariant):
        check_plan(wrong, CONFIG, pause, pool)


@pytest.mark.parametrize(
    "column",
    ["num_tokens", "num_computed_tokens", "new_block_ids", "draft_token_ids", "samples", "request_ids"],
)
def test_columns_of_unequal_length_are_noticed(column: str):
    wrong = plan([1, 1])
    columns: dict[str, list] = {
        "num_tokens": wrong.num_tokens,
        "num_computed_tokens": wrong.num_computed_tokens,
        "new_block_ids": wrong.new_block_ids,
        "draft_token_ids": wrong.draft_token_ids,
        "samples": wrong.samples,
        "request_ids": wrong.request_ids,
    }
    del columns[column][0]
    with pytest.raises(BrokenInvariant, match="columns"):
        check_plan(wrong, CONFIG, PauseState.NONE, BlockPool(4))


def test_who_is_admitted_comes_last_and_not_in_a_step_that_preempts():
    pool = BlockPool(4)
    admitted = AdmittedRequest("r0", [1], 1, SAMPLING, [[]])
    first = plan([1, 1])
    first.admitted.append(admitted)
    with pytest.raises(BrokenInvariant, match="order"):
        check_plan(first, CONFIG, PauseState.NONE, pool)
    for preempted, pause in ([], PauseState.NONE), (["r9"], PauseState.NONE), ([], PauseState.NEW):
        alone = plan([1])
        alone.admitted.append(admitted)
        alone.preempted += preempted
        if not preempted and pause is PauseState.NONE:
            check_plan(alone, CONFIG, pause, pool)
            continue
        with pytest.raises(BrokenInvariant, match="order"):
            check_plan(alone, CONFIG, pause, pool)


def test_what_is_given_back_is_what_was_taken():
    watch, row = BudgetWatch(), request("r0")
    watch.take(row, 3)
    with pytest.raises(BrokenInvariant, match="budget"):
        watch.check(plan([2]))
    watch.check(plan([3]))
    with pytest.raises(BrokenInvariant, match="budget"):
        watch.take(row, 3)
    with pytest.raises(BrokenInvariant, match="budget"):
        watch.give_back(row, 2)


def test_the_same_seed_lives_the_same_life():
    assert draw_setup(random.Random(5)) == draw_setup(random.Random(5))
    assert draw_setup(random.Random(5)) != draw_setup(random.Random(6))
    assert Simulation(5).run(20) == Simulation(5).run(20)


def test_a_report_tells_broken_seeds_and_what_is_too_rare():
    report = Report(100, num_seeds=100)
    report.num_seeds_with.update({"hit": 5, "eviction": 4})
    report.faults.append(Fault(7, "isolation", "wrong", 3, ""))
    summary = report.as_json()
    assert summary["broken"] == [{"seed": 7, "step": 3, "invariant": "isolation", "detail": "wrong"}]
    assert "hit" not in report.too_rare and "eviction" in report.too_rare and "preemption" in report.too_rare
    assert summary["coverage"]["hit"] == 0.05


# The simulator's runner computes what it was planned to, and sees every block that holds something else.

TOKENS = [3, 4, 5, 6]


def runner(*kinds: AttentionKind, overlaps: bool = False) -> PagedRunner:
    """A runner for these groups, which knows some requests of one tenant and one of another."""
    made = PagedRunner(kinds or (FullAttention(2),), random.Random(0), overlaps=overlaps)
    made.identities = {name: Identity(11, (), 3) for name in "abc"} | {"other": Identity(12, ())}
    return made


def admission(
    request_id: str, block_ids: list[list[int]], *, token_ids: list[int] = TOKENS
) -> AdmittedRequest:
    return AdmittedRequest(request_id, token_ids, len(token_ids), SamplingParams(max_tokens=8), block_ids)


def row_plan(
    request_id: str,
    computed: int,
    num_tokens: int,
    new_block_ids: list[list[int]],
    *,
    admitted: AdmittedRequest | None = None,
    drafts: tuple[int, ...] = (),
    samples: bool = True,
) -> StepPlan:
    return StepPlan(
        step_number=1,
        admitted=[] if admitted is None else [admitted],
        request_ids=[request_id],
        num_tokens=[num_tokens],
        num_computed_tokens=[computed],
        new_block_ids=[new_block_ids],
        draft_token_ids=[list(drafts)],
        samples=[samples],
    )


@pytest.mark.parametrize(
    ("request_id", "token_ids", "block_id"),
    [("b", [3, 9, 5, 6], 1), ("other", TOKENS, 1), ("b", TOKENS, 2), ("b", TOKENS, 7)],
    ids=["other tokens", "other tenant", "other block", "never written"],
)
def test_a_prefix_of_other_content_is_noticed(request_id: str, token_ids: list[int], block_id: int):
    small = runner()
    small.run(row_plan("a", 0, 4, [[1, 2]], admitted=admission("a", [[]])))
    admitted = admission(request_id, [[block_id]], token_ids=token_ids)
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(row_plan(request_id, 2, 2, [[3]], admitted=admitted))


def test_a_block_that_another_row_wrote_to_is_noticed():
    small = runner()
    small.run(row_plan("a", 0, 4, [[1, 2]], admitted=admission("a", [[]])))
    small.run(row_plan("b", 0, 4, [[2, 3]], admitted=admission("b", [[]], token_ids=[7, 8, 9, 9])))
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(row_plan("a", 4, 1, [[4]]))


def test_a_half_filled_block_that_another_group_wrote_to_is_noticed():
    small = runner(FullAttention(4), FullAttention(4))
    small.run(row_plan("a", 0, 3, [[1], [2]], admitted=admission("a", [[], []]), samples=False))
    small.run(row_plan("b", 0, 3, [[3], [1]], admitted=admission("b", [[], []]), samples=False))
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(row_plan("a", 3, 1, []))


def test_a_window_needs_what_it_reads_and_nothing_before():
    small = runner(SlidingWindow(2, 3))
    small.run(row_plan("a", 0, 4, [[1, 2]], admitted=admission("a", [[]])))
    assert small.run(
        row_plan("b", 4, 1, [[3]], admitted=admission("b", [[0, 2]], token_ids=[*TOKENS, 7]))
    ).sampled[0]
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(row_plan("c", 4, 1, [[4]], admitted=admission("c", [[1, 0]], token_ids=[*TOKENS, 7])))


def test_what_the_encoder_wrote_is_read_again():
    small = runner(FullAttention(4), CrossAttention(2))
    small.run(row_plan("a", 0, 4, [[1], [2, 3]], admitted=admission("a", [[], []])))
    assert small.run(row_plan("a", 4, 1, [[4], []])).sampled[0]
    small.run(row_plan("b", 0, 4, [[3], [5, 6]], admitted=admission("b", [[], []])))
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(row_plan("a", 5, 1, []))


@pytest.mark.parametrize(
    ("kind", "position", "first"),
    [
        (FullAttention(2), 9, 0),
        (SlidingWindow(2, 4), 9, 6),
        (SlidingWindow(2, 1), 9, 9),
        (SlidingWindow(2, 4), 2, 0),
        (ChunkedLocal(2, 4), 9, 8),
        (ChunkedLocal(2, 4), 8, 8),
        (ChunkedLocal(2, 4), 7, 4),
    ],
)
def test_where_reading_begins(kind: AttentionKind, position: int, first: int):
    assert first_read(kind, position) == first


@pytest.mark.parametrize(
    "wrong",
    [
        row_plan("a", 5, 1, [[3]]),
        row_plan("a", 4, 1, [[3]], samples=False),
        row_plan("a", 3, 1, []),
        row_plan("a", 4, 1, []),
        row_plan("a", 4, 1, [[0]]),
        row_plan("a", 4, 1, [[3]], admitted=admission("a", [[]])),
        StepPlan(2, released=["b"]),
    ],
    ids=[
        "too far",
        "does not sample",
        "too short",
        "no room",
        "placeholder",
        "admitted twice",
        "released twice",
    ],
)
def test_a_plan_that_does_not_fit_the_rows_is_noticed(wrong: StepPlan):
    small = runner()
    small.run(row_plan("a", 0, 4, [[1, 2]], admitted=admission("a", [[]])))
    with pytest.raises(BrokenInvariant):
        small.run(wrong)


STATE_KINDS = (KeptState(2, 4),)


def state_runner() -> PagedRunner:
    small = PagedRunner(STATE_KINDS, random.Random(1))
    for request_id in ("a", "b"):
        small.identities[request_id] = Identity(7, ())
    small.run(row_plan("a", 0, 4, [[0, 5]], admitted=admission("a", [[]])))
    return small


@pytest.mark.parametrize(
    "wrong",
    [
        row_plan("b", 2, 2, [[6]], admitted=admission("b", [[5]])),
        row_plan("b", 4, 1, [[6]], admitted=admission("b", [[0, 7]], token_ids=[*TOKENS, 9])),
        row_plan("b", 4, 1, [[6]], admitted=admission("b", [[0, 5]], token_ids=[8, *TOKENS])),
        row_plan("b", 0, 4, [[0, 0]], admitted=admission("b", [[]])),
    ],
    ids=["after more tokens", "never written", "of other tokens", "nowhere to write"],
)
def test_a_state_that_is_not_that_of_the_tokens_is_noticed(wrong: StepPlan):
    with pytest.raises(BrokenInvariant):
        state_runner().run(wrong)


def test_a_state_of_the_same_tokens_is_taken_over():
    small = state_runner()
    small.run(row_plan("b", 4, 1, [[6]], admitted=admission("b", [[0, 5]], token_ids=[*TOKENS, 9])))


def test_a_state_that_another_row_of_the_step_writes_is_noticed():
    small = state_runner()
    plan = row_plan("b", 4, 1, [[6]], admitted=admission("b", [[0, 5]], token_ids=[*TOKENS, 9]))
    plan.request_ids.append("a")
    plan.num_tokens.append(1)
    plan.num_computed_tokens.append(4)
    plan.new_block_ids.append([[5]])
    plan.draft_token_ids.append([])
    plan.samples.append(True)
    with pytest.raises(BrokenInvariant, match="isolation: b reads state 5, which a writes"):
        small.run(plan)


def test_a_kept_state_has_the_hash_of_its_tokens():
    config = CacheConfig(4, STATE_KINDS, num_state_slots=2)
    cache = KVCache(config, max_model_len=32, max_in_flight_tokens=32)
    slots = cache.pools[1]
    key = content_key(bytes(32), 0)
    slots.register(slots.allocate(1), [key])
    check_states(cache, config, [{4: (1,)}], {bytes(32): 1})
    with pytest.raises(BrokenInvariant, match="state 4 is not that of its hash"):
        check_states(cache, config, [{4: (2,)}], {bytes(32): 1})
    slots.hold(slots.allocate(1))
    with pytest.raises(BrokenInvariant, match="state 5 has two users"):
        check_states(cache, config, [{4: (1,)}], {bytes(32): 1})
