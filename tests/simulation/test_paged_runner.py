"""The simulator's runner computes what it was planned to, and sees every block that holds something else."""

from __future__ import annotations

import random

import pytest

from engine_svc.cache.attention import (
    AttentionKind,
    ChunkedLocal,
    CrossAttention,
    FullAttention,
    SlidingWindow,
)
from engine_svc.sampling_params import SamplingParams
from engine_svc.step import AdmittedRequest, StepPlan
from tests.simulation.broken import BrokenInvariant
from tests.simulation.digest_model import Identity
from tests.simulation.paged_runner import PagedRunner, first_read

TOKENS = [3, 4, 5, 6]


def runner(*kinds: AttentionKind, overlaps: bool = False) -> PagedRunner:
    """A runner for these groups, which knows some requests of one tenant and one of another."""
    made = PagedRunner(kinds or (FullAttention(2),), random.Random(0), overlaps=overlaps)
    made.identities = {name: Identity(11, (), 3) for name in "abc"} | {"other": Identity(12, ())}
    return made


def admission(
    request_id: str, block_ids: list[list[int]], *, token_ids: list[int] = TOKENS
) -> AdmittedRequest:
    """A request enters with these blocks."""
    return AdmittedRequest(request_id, token_ids, len(token_ids), SamplingParams(max_tokens=8), block_ids)


def plan(
    request_id: str,
    computed: int,
    num_tokens: int,
    new_block_ids: list[list[int]],
    *,
    admitted: AdmittedRequest | None = None,
    drafts: tuple[int, ...] = (),
    samples: bool = True,
) -> StepPlan:
    """A step of one row."""
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
    small.run(plan("a", 0, 4, [[1, 2]], admitted=admission("a", [[]])))
    admitted = admission(request_id, [[block_id]], token_ids=token_ids)
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(plan(request_id, 2, 2, [[3]], admitted=admitted))


def test_a_block_that_another_row_wrote_to_is_noticed():
    small = runner()
    small.run(plan("a", 0, 4, [[1, 2]], admitted=admission("a", [[]])))
    small.run(plan("b", 0, 4, [[2, 3]], admitted=admission("b", [[]], token_ids=[7, 8, 9, 9])))
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(plan("a", 4, 1, [[4]]))


def test_a_half_filled_block_that_another_group_wrote_to_is_noticed():
    small = runner(FullAttention(4), FullAttention(4))
    small.run(plan("a", 0, 3, [[1], [2]], admitted=admission("a", [[], []]), samples=False))
    small.run(plan("b", 0, 3, [[3], [1]], admitted=admission("b", [[], []]), samples=False))
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(plan("a", 3, 1, []))


def test_a_window_needs_what_it_reads_and_nothing_before():
    small = runner(SlidingWindow(2, 3))
    small.run(plan("a", 0, 4, [[1, 2]], admitted=admission("a", [[]])))
    assert small.run(
        plan("b", 4, 1, [[3]], admitted=admission("b", [[0, 2]], token_ids=[*TOKENS, 7]))
    ).sampled[0]
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(plan("c", 4, 1, [[4]], admitted=admission("c", [[1, 0]], token_ids=[*TOKENS, 7])))


def test_what_the_encoder_wrote_is_read_again():
    small = runner(FullAttention(4), CrossAttention(2))
    small.run(plan("a", 0, 4, [[1], [2, 3]], admitted=admission("a", [[], []])))
    assert small.run(plan("a", 4, 1, [[4], []])).sampled[0]
    small.run(plan("b", 0, 4, [[3], [5, 6]], admitted=admission("b", [[], []])))
    with pytest.raises(BrokenInvariant, match="isolation"):
        small.run(plan("a", 5, 1, []))


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
        plan("a", 5, 1, [[3]]),
        plan("a", 4, 1, [[3]], samples=False),
        plan("a", 3, 1, []),
        plan("a", 4, 1, []),
        plan("a", 4, 1, [[0]]),
        plan("a", 4, 1, [[3]], admitted=admission("a", [[]])),
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
    small.run(plan("a", 0, 4, [[1, 2]], admitted=admission("a", [[]])))
    with pytest.raises(BrokenInvariant):
        small.run(wrong)
