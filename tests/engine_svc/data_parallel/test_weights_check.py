"""Which ranks have other weights than those that they would step with."""

from __future__ import annotations

import pytest

from engine_svc.core.errors import PeersLost
from engine_svc.data_parallel.weights_check import (
    WEIGHTS_MISMATCH,
    RankWeights,
    check_weights,
    number_of,
    text_of,
)
from triptych_kit.errors import FailedPrecondition

OLD, NEW = number_of("ab" * 32), number_of("12" * 32)


def verdict(ranks: list[RankWeights], own: int) -> str:
    try:
        check_weights(ranks, own)
    except FailedPrecondition as error:
        return "odd" if error.reason == WEIGHTS_MISMATCH else error.reason
    except PeersLost:
        return "lost"
    return "same"


@pytest.mark.parametrize("digest", ["", "00" * 32, "7f" * 32, "80" * 32, "ff" * 32, "0123456789abcdef"])
def test_a_digest_begins_with_the_number_that_stands_for_it(digest):
    assert -(2**63) <= number_of(digest) < 2**63
    assert text_of(number_of(digest)) == (digest[:16] or "0" * 16)


@pytest.mark.parametrize(
    ("ranks", "verdicts"),
    [
        ([(OLD, False)], ["same"]),
        ([(OLD, True), (OLD, False)], ["same", "same"]),
        ([(OLD, False), (NEW, True)], ["odd", "lost"]),
        ([(OLD, False), (NEW, True), (NEW, False)], ["odd", "lost", "lost"]),
        ([(OLD, True), (NEW, True)], ["lost", "odd"]),
        ([(OLD, False), (NEW, False)], ["lost", "odd"]),
        ([(OLD, True), (NEW, True), (NEW, True)], ["odd", "lost", "lost"]),
        ([(OLD, True), (NEW, False), (NEW, False)], ["lost", "odd", "odd"]),
        ([(OLD, False), (NEW, False), (NEW, False)], ["odd", "lost", "lost"]),
        ([(NEW, True), (OLD, False), (NEW, True), (OLD, True)], ["lost", "odd", "lost", "odd"]),
    ],
)
def test_the_weights_of_a_group_are_those_that_it_serves_by(ranks, verdicts):
    weights = [RankWeights(*rank) for rank in ranks]
    assert [verdict(weights, own) for own in range(len(weights))] == verdicts


def test_both_digests_are_reported():
    with pytest.raises(FailedPrecondition) as raised:
        check_weights([RankWeights(NEW, True), RankWeights(OLD, False)], 1)
    assert raised.value.message == (
        "this engine, rank 1, has weights abababababababab, and rank 0 has 1212121212121212"
    )
