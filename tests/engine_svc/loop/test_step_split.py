"""Steps that are too large for one message, and come in several."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from engine_svc.convert import messages
from engine_svc.core.request import DraftUse, FinishReason, FirstOutput, RequestOutput
from engine_svc.core.step import TokenLogprobs
from engine_svc.features.prompt_logprobs.extras import PromptLogprobs, PromptRun
from engine_svc.loop.mailbox import Outbox
from engine_svc.loop.output_router import OutputRouter
from engine_svc.loop.step_output import (
    MAX_PIECE_BYTES,
    FinishedRow,
    LogprobDeltas,
    StepOutput,
    UnreadSteps,
    split,
)
from tests.engine_svc.request_options import make_wire_features
from triptych_kit.server import INTERNAL

FEATURES = make_wire_features()


def logprobs_of(num_positions: int, k: int, *, first: int = 0) -> TokenLogprobs:
    """Logprobs of positions, each different from the others."""
    entries = [place * 1000 + entry for place in range(first, first + num_positions) for entry in range(k)]
    return TokenLogprobs(
        [-1.0 - place for place in range(first, first + num_positions)],
        list(range(first + 1, first + num_positions + 1)),
        k,
        entries,
        [-0.5 - entry for entry in entries],
    )


def prompt_of(*runs: PromptRun) -> dict[type, PromptLogprobs]:
    """What a step has for a request besides tokens."""
    return {PromptLogprobs: PromptLogprobs(runs)}


def runs_of(piece: StepOutput, handle: int) -> tuple[PromptRun, ...]:
    extras = piece.extras.get(handle, {})
    return extras[PromptLogprobs].runs if extras else ()


def sizes(found: list[StepOutput]) -> list[int]:
    """Bytes of the messages that are made of them."""
    return [messages.to_step(piece, {}, FEATURES, 0.0).ByteSize() for piece in found]


def joined(found: list[StepOutput]) -> StepOutput:
    unread = UnreadSteps()
    for piece in found:
        assert len(set(piece.handles)) == len(piece.handles)
        unread.add(piece)
    return unread.merged()


def test_a_step_that_fits_is_left_as_it_is():
    output = StepOutput(3, [1, 2], [1, 1], [8, 9], token_logprobs=LogprobDeltas({1: logprobs_of(1, 2)}))
    assert split(output, MAX_PIECE_BYTES) == [output]
    assert split(output, MAX_PIECE_BYTES)[0] is output


def test_a_piece_is_far_below_what_a_frontend_takes():
    assert INTERNAL.max_receive_bytes >= 8 * MAX_PIECE_BYTES


def test_one_row_with_logprobs_of_the_whole_vocabulary_does_not_widen_the_others():
    token_logprobs = LogprobDeltas({5: logprobs_of(1, 900)})
    output = StepOutput(3, list(range(64)), [1] * 64, list(range(64)), token_logprobs=token_logprobs)
    assert messages.to_step(output, {}, FEATURES, 0.0).ByteSize() > 64 * 7200
    found = split(output, 10_000)
    assert [(len(piece.handles), piece.step_number) for piece in found] == [(63, 3), (1, 3)]
    assert found[1].handles == [5] and found[1].token_ids == [5]
    assert sum(sizes(found)) < 10_000


def test_a_row_of_very_many_tokens_is_cut_where_a_step_ended():
    output = StepOutput(
        9,
        [4],
        [100],
        list(range(100)),
        finished=[FinishedRow(0, FinishReason.STOP)],
        first=[(0, FirstOutput(16))],
        parts=[(0, [7] * 14 + [2])],
    )
    found = split(output, 300)
    assert max(sizes_with_stop(found)) <= 300
    assert all(piece.num_tokens[0] % 7 == 0 for piece in found[:-1])
    assert [len(piece.finished) for piece in found] == [0] * (len(found) - 1) + [1]
    assert [piece.first for piece in found] == [[(0, FirstOutput(16))]] + [[]] * (len(found) - 1)
    assert [count for piece in found for _, counts in piece.parts for count in counts] == [7] * 14 + [2]
    assert found[-1].num_tokens[0] > 0
    assert joined(found) == output


def sizes_with_stop(found: list[StepOutput]) -> list[int]:
    return [messages.to_step(piece, {4: frozenset()}, FEATURES, 0.0).ByteSize() for piece in found]


def test_a_step_that_is_too_long_by_itself_is_cut_all_the_same():
    found = split(
        StepOutput(9, [4], [100], list(range(100)), token_logprobs=LogprobDeltas({4: logprobs_of(100, 3)})),
        400,
    )
    assert max(sizes(found)) <= 400
    assert [token for piece in found for token in piece.token_ids] == list(range(100))
    assert joined(found).token_logprobs == LogprobDeltas({4: logprobs_of(100, 3)})


def test_extras_precede_the_tokens_of_their_row():
    runs = [
        PromptRun(1, logprobs_of(60, 4, first=1)),
        PromptRun(61, logprobs_of(3, 4, first=61)),
    ]
    output = StepOutput(
        2,
        [8, 9],
        [0, 2],
        [1, 2],
        first=[(1, FirstOutput(0))],
        extras={8: prompt_of(*runs[1:]), 9: prompt_of(*runs)},
    )
    found = split(output, 800)
    assert max(sizes(found)) <= 800
    (begins,) = [index for index, piece in enumerate(found) if piece.first]
    prompts = [run for piece in found for run in runs_of(piece, 9)]
    assert [run.first_position for run in prompts] == sorted(run.first_position for run in prompts)
    assert [rank for run in prompts for rank in run.token_logprobs.ranks] == list(range(2, 65))
    assert all(9 not in piece.handles for piece in found[begins + 1 :])
    assert [run for piece in found for run in runs_of(piece, 8)] == runs[1:]


def test_a_place_that_is_too_large_by_itself_comes_alone():
    extras = {5: prompt_of(PromptRun(1, TokenLogprobs([], [])))}
    token_logprobs = LogprobDeltas({4: logprobs_of(3, 100)})
    output = StepOutput(2, [4, 5, 6], [3, 0, 0], [1, 2, 3], token_logprobs=token_logprobs, extras=extras)
    found = split(output, 500)
    assert [piece.handles for piece in found] == [[5, 6], [4], [4], [4]]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_step_has_its_pieces_say_the_same_and_none_is_too_large(seed):
    rng = random.Random(seed)
    output, max_bytes = any_output(rng), rng.randrange(600, 3000)
    found = split(output, max_bytes)
    assert max(sizes(found)) <= max_bytes
    assert contents(found) == contents([output])


def any_output(rng: random.Random) -> StepOutput:
    """A step of several rows with anything that a row may have."""
    output = StepOutput(7, token_logprobs=LogprobDeltas())
    assert output.token_logprobs is not None
    for row, handle in enumerate(rng.sample(range(1000), 20)):
        counts = [rng.randrange(1, 9) for _ in range(rng.randrange(8))]
        num_tokens = sum(counts)
        output.handles.append(handle)
        output.num_tokens.append(num_tokens)
        output.token_ids += [rng.randrange(1000) for _ in range(num_tokens)]
        if len(counts) > 1:
            output.parts.append((row, counts))
        if rng.random() < 0.3:
            output.first.append((row, FirstOutput(rng.randrange(100))))
        if rng.random() < 0.3:
            drafts = rng.choice((None, DraftUse(2**31, 2**31)))
            message = "x" * rng.randrange(40)
            output.finished.append(FinishedRow(row, FinishReason.ERROR, message=message, drafts=drafts))
        if num_tokens and rng.random() < 0.5:
            output.token_logprobs.sampled[handle] = logprobs_of(num_tokens, rng.randrange(5))
        if rng.random() < 0.3:
            ends = [1, *sorted(rng.sample(range(2, 90), 3))]
            k = rng.randrange(5)
            output.extras[handle] = prompt_of(
                *(PromptRun(first, logprobs_of(end - first, k, first=first)) for first, end in pairwise(ends))
            )
    return output


def contents(found: list[StepOutput]) -> dict[int, dict[str, list[object]]]:
    """By handle, all that its request receives, in order."""
    by_handle: dict[int, dict[str, list[object]]] = {}
    for piece in found:
        start, token_logprobs = 0, piece.token_logprobs or LogprobDeltas()
        rows = [by_handle.setdefault(handle, defaultdict(list)) for handle in piece.handles]
        for handle, row, num_tokens in zip(piece.handles, rows, piece.num_tokens, strict=True):
            for run in runs_of(piece, handle):
                assert not row["tokens"], "a prompt is reported before its request begins"
                first = run.first_position
                row["places"] += range(first, first + len(run.token_logprobs.ranks))
                row["prompt ranks"] += run.token_logprobs.ranks
                row["prompt others"] += run.token_logprobs.top_token_ids
            row["tokens"] += piece.token_ids[start : start + num_tokens]
            start += num_tokens
            if handle in token_logprobs.sampled:
                assert len(token_logprobs.sampled[handle].ranks) == num_tokens
                row["ranks"] += token_logprobs.sampled[handle].ranks
                row["others"] += token_logprobs.sampled[handle].top_token_ids
        for finished in piece.finished:
            rows[finished.row]["ends"].append((finished.reason, finished.message, finished.drafts))
        for first_row, num_cached_tokens in piece.first:
            rows[first_row]["cached"].append(num_cached_tokens)
    return by_handle


# What a step reports reaches those that asked, once, and keeps its order when steps are merged.


def one(logprob: float) -> TokenLogprobs:
    return TokenLogprobs([logprob], [1], 1, [5], [logprob])


def sampled_logprobs(routes):
    """The logprobs of a step with the requests a, b and c, by session."""
    router = OutputRouter()
    router.by_id.update(routes)
    sampled = {"a": one(-1.0), "b": one(-2.0), "c": one(-3.0)}
    outputs = [RequestOutput(request_id, [1]) for request_id in routes]
    return {outbox: step.token_logprobs for outbox, step in router.rows(outputs, sampled, 1).items()}


def test_each_session_gets_the_logprobs_of_its_own_requests_by_handle():
    assert sampled_logprobs({"a": ("first", 7), "b": ("second", 7), "c": ("first", 8)}) == {
        "first": LogprobDeltas({7: one(-1.0), 8: one(-3.0)}),
        "second": LogprobDeltas({7: one(-2.0)}),
    }


def test_logprobs_of_an_ended_request_are_dropped():
    assert sampled_logprobs({"b": ("second", 7)}) == {"second": LogprobDeltas({7: one(-2.0)})}


def test_a_step_keeps_the_logprobs_of_its_own_tokens():
    output = StepOutput(1, [5, 6, 7], [1, 0, 2], [9, 9, 9])
    several = TokenLogprobs([-1.0, -2.0, -3.0], [1, 2, 3], 2, [1, 2, 3, 4, 5, 6], [0.0] * 6)
    output.add_logprobs(LogprobDeltas({5: several, 6: one(-1.0), 7: several, 8: one(-2.0)}))
    assert output.token_logprobs.sampled == {
        5: TokenLogprobs([-1.0], [1], 2, [1, 2], [0.0] * 2),
        7: TokenLogprobs([-1.0, -2.0], [1, 2], 2, [1, 2, 3, 4], [0.0] * 4),
    }


def test_merged_steps_keep_all_logprobs_and_extras_in_order():
    outbox = Outbox(max_bytes=1_000_000, wake=lambda: None)
    for number in range(40):
        output = StepOutput(number, [5, 6], [1, 1], [number, number])
        output.add_logprobs(LogprobDeltas({5: one(-float(number))}))
        output.extras[6] = prompt_of(PromptRun(number + 1, one(-1.0)))
        outbox.publish(output)
    merged = outbox.take()
    assert merged.token_logprobs.sampled[5].logprobs == [-float(number) for number in range(40)]
    assert merged.token_logprobs.sampled[5].top_logprobs == merged.token_logprobs.sampled[5].logprobs
    assert [run.first_position for run in runs_of(merged, 6)] == list(range(1, 41))
    assert dict(zip(merged.handles, merged.num_tokens, strict=True)) == {5: 40, 6: 40}


@pytest.mark.parametrize("is_extra", [False, True], ids=["logprobs", "extras"])
def test_logprobs_and_extras_count_towards_the_size_of_unread_steps(is_extra):
    outbox = Outbox(max_bytes=10_000, wake=lambda: None)
    for number in range(30):
        logprobs = TokenLogprobs([-1.0] * 50, [1] * 50)
        output = StepOutput(number, [5], [50], [1] * 50)
        if is_extra:
            output.extras[5] = prompt_of(PromptRun(1, logprobs))
        else:
            output.add_logprobs(LogprobDeltas({5: logprobs}))
        outbox.publish(output)
    assert outbox.has_overflowed
