"""Work that is answered elsewhere, and what is left of it where it fails."""

from __future__ import annotations

import traceback
import weakref
from concurrent.futures import Future

import pytest

from engine_svc.loop.answer import give
from tests.connections import without_collections


class Tensor:
    """Something large that work has in hand."""


def fail(held: list[weakref.ref[Tensor]]) -> None:
    in_hand = Tensor()
    held.append(weakref.ref(in_hand))
    raise ValueError("bad luck")


def fail_as_a_refusal(held: list[weakref.ref[Tensor]]) -> None:
    try:
        fail(held)
    except ValueError as error:
        raise RuntimeError("refused") from error


def fail_while_failing(held: list[weakref.ref[Tensor]]) -> None:
    try:
        fail(held)
    except ValueError:
        fail(held)


@pytest.mark.parametrize("work", [fail, fail_as_a_refusal, fail_while_failing])
def test_an_error_says_where_it_arose_and_holds_nothing_that_the_work_had_in_hand(work):
    held: list[weakref.ref[Tensor]] = []
    answer: Future[None] = Future()
    with without_collections():
        give(answer, lambda: work(held))
        assert {in_hand() for in_hand in held} == {None}
    assert "in fail\n" in "".join(traceback.format_exception(answer.exception()))
