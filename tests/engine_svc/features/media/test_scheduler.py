"""What the encoder computes in a step, what is kept of it, and what that costs requests without items."""

from __future__ import annotations

from dataclasses import replace

from engine_svc.core.request import ContentSpan, InputSegment, Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import StepPlan
from engine_svc.features.media.extras import (
    KEY_PREFIX,
    EncoderWork,
    MediaContent,
    MediaItems,
    PromptItem,
    RowItems,
)
from engine_svc.features.media.scheduler import EncoderCache, EncoderSteps, replayed
from tests.engine_svc.scheduler.fakes import Stage, granted, request


def with_items(request_id: str, num_tokens: int, *items: tuple[str, int, int], **options: object) -> Request:
    """items: content, first position and length of each."""
    made = request(request_id, num_tokens, **options)
    made.spans = tuple(ContentSpan(start, length, KEY_PREFIX + name) for name, start, length in items)
    return made


def encoder_steps(max_outputs: int, max_kept: int, *, divides: bool = True) -> EncoderSteps:
    return replayed({"max_outputs": max_outputs, "max_kept": max_kept, "divides": divides, "num_ahead": 0})


def stage_of(encoder: EncoderSteps, **options: object) -> Stage:
    return Stage(features=[encoder], **options)


def encoded(plan: StepPlan) -> dict[str, tuple[int, ...]]:
    work = plan.extras.get(EncoderWork)
    return {} if work is None else {row.request_id: row.items for row in work.rows}


def evicted(plan: StepPlan) -> list[str]:
    return [key.removeprefix(KEY_PREFIX) for key in plan.extras[EncoderWork].evicted]


# Behaviour 6, row 234.
def test_a_request_whose_item_cannot_be_encoded_yet_gets_the_tokens_before_it():
    stage = stage_of(encoder_steps(1024, 8192), max_num_batched_tokens=1024)
    stage.add(*(with_items(f"r{index}", 800, (f"item {index}", 100, 600)) for index in range(3)))
    plan = stage.step()
    assert (granted(plan), encoded(plan)) == ({"r0": 800, "r1": 100, "r2": 100}, {"r0": (0,)})
    plan = stage.step()
    assert (granted(plan), encoded(plan)) == ({"r0": 1, "r1": 700}, {"r1": (0,)})
    assert stage.scheduler.running_ids == ["r0", "r1", "r2"]


# Behaviour 7.
def test_a_chunk_ends_before_an_item_that_is_not_divided():
    stage = stage_of(encoder_steps(1024, 1024, divides=False), max_num_batched_tokens=1024)
    stage.add(with_items("a", 1200, ("item", 400, 800)))
    assert [granted(stage.step()) for _ in range(2)] == [{"a": 400}, {"a": 800}]


# Behaviour 69, row 235.
def test_an_output_stays_until_room_is_needed_the_one_released_first_goes_first():
    cache, first, second = EncoderCache(10), request("a", 1), request("b", 1)
    cache.put(first, "four", 4)
    assert (cache.num_free, cache.num_reclaimable) == (6, 6)
    cache.release(first, "four")
    assert (cache.num_free, cache.num_reclaimable) == (6, 10)
    assert cache.hold(second, "four")
    assert not cache.make_room(7)
    cache.release(second, "four")
    assert cache.make_room(6)
    cache.put(first, "six", 6)
    assert (cache.evicted, cache.num_free) == ([], 0)
    assert not cache.make_room(5)
    cache.release(first, "six")
    assert cache.make_room(4)
    assert (cache.evicted, cache.hold(first, "four"), cache.hold(first, "six")) == (["four"], False, True)


def test_content_that_is_encoded_again_in_the_step_that_evicts_it_is_not_dropped():
    encoder = encoder_steps(16, 16)
    stage = stage_of(encoder)
    stage.add(with_items("a", 20, ("x", 2, 8), max_tokens=1), with_items("b", 20, ("y", 2, 8), max_tokens=1))
    stage.step()
    stage.add(with_items("c", 40, ("z", 2, 8), ("x", 20, 8), max_tokens=1))
    plan = stage.step()
    assert (encoded(plan), evicted(plan)) == ({"c": (0, 1)}, ["y"])


def test_a_second_request_with_the_same_content_encodes_nothing():
    stage = stage_of(encoder_steps(64, 64))
    stage.add(with_items("a", 20, ("x", 2, 8)))
    assert encoded(stage.step()) == {"a": (0,)}
    stage.add(with_items("b", 20, ("x", 5, 8)))
    plan = stage.step()
    assert (granted(plan), EncoderWork in plan.extras) == ({"a": 1, "b": 20}, False)


def test_rows_behind_the_last_item_and_those_without_any_do_not_spend_the_budget():
    """Most rows decode: they cost the feature nothing."""
    stage = stage_of(encoder_steps(64, 64), max_num_batched_tokens=16)
    plain, own = request("plain", 4), with_items("own", 20, ("x", 2, 8))
    stage.add(plain, own)
    stage.step()
    assert (plain.num_budgets, own.num_budgets) == (0, 0)
    stage.preempt_running()
    assert (plain.num_budgets, own.num_budgets) == (0, 1)
    stage.scheduler.abort(["own"], now=9.0)
    assert own.num_budgets == 0


def test_an_item_in_the_middle_of_a_chunk_is_awaited_by_its_budget():
    stage = stage_of(encoder_steps(64, 64), max_num_batched_tokens=6)
    own = with_items("own", 20, ("x", 2, 8))
    stage.add(own)
    stage.step()
    assert own.num_budgets == 1
    stage.step()
    assert own.num_budgets == 0


def test_a_preempted_request_finds_its_output_again():
    encoder = encoder_steps(64, 8)
    stage = stage_of(encoder, enable_prefix_caching=False)
    stage.add(with_items("a", 20, ("x", 2, 8)))
    assert encoded(stage.step()) == {"a": (0,)}
    stage.preempt_running()
    assert (encoder.cache.num_free, encoder.cache.num_reclaimable) == (0, 8)
    plan = stage.step()
    assert (granted(plan), encoded(plan)) == ({"a": 21}, {})


def test_a_request_that_finds_no_blocks_holds_no_output_while_it_waits():
    encoder = encoder_steps(64, 64)
    stage = stage_of(encoder, num_blocks=3, block_size=16)
    stage.add(with_items("a", 20, ("x", 2, 8)))
    stage.step()
    stage.add(with_items("b", 30, ("x", 2, 8)))
    assert stage.step().request_ids == ["a"]
    assert encoder.cache.num_reclaimable == 64


def test_what_steps_that_were_rolled_back_would_have_encoded_is_encoded_again():
    stage = stage_of(encoder_steps(64, 64))
    stage.add(with_items("a", 20, ("x", 2, 8)))
    stage.schedule()
    stage.scheduler.withdraw(now=2.0)
    plan = stage.step()
    assert plan.extras[EncoderWork].rows == (RowItems("a", (0,)),)


def test_items_of_a_later_turn_are_counted_from_the_first():
    stage = stage_of(encoder_steps(64, 64), enable_prefix_caching=False)
    resumable = with_items("a", 20, ("x", 2, 8), stop_token_ids=[42], is_resumable=True)
    stage.add(resumable)
    stage.step({"a": [42]})
    from_start = resumable.num_tokens
    spans = (ContentSpan(1, 4, KEY_PREFIX + "y"),)
    stage.scheduler.extend("a", InputSegment([5] * 6, SamplingParams(max_tokens=4), spans=spans), now=2.0)
    assert encoded(stage.step()) == {"a": (1,)}
    assert resumable.spans[1].start == from_start + 1


def test_the_ranks_get_the_items_of_all_turns_with_a_later_one():
    """What was computed of earlier turns may have to be computed again."""
    stage = stage_of(encoder_steps(64, 64))
    resumable = with_items("a", 20, ("x", 2, 8), stop_token_ids=[42], is_resumable=True)
    first, second = (PromptItem(MediaContent(name, ()), start, 4) for name, start in (("x", 2), ("y", 1)))
    resumable.extras[MediaItems] = MediaItems((first,))
    stage.add(resumable)
    stage.step({"a": [42]})
    start = resumable.num_tokens
    further = InputSegment(
        [5] * 6,
        SamplingParams(max_tokens=4),
        extras={MediaItems: MediaItems((second,))},
        spans=(ContentSpan(1, 4, second.key),),
    )
    stage.scheduler.extend("a", further, now=2.0)
    assert resumable.extras[MediaItems].items == (first, replace(second, start=start + 1))
