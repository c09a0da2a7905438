"""What a rank says when it cannot get ready."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from engine_svc.build import rank_main
from engine_svc.config import EngineConfig
from engine_svc.model.process_parallel import ProcessParallel, RankPosition
from engine_svc.ranks.control_pipe import RankConnection
from engine_svc.ranks.process_group import GroupLimits
from engine_svc.ranks.progress_board import RankHeartbeats


class ClosedConnection:
    """A line whose engine ends the rank as soon as it listens."""

    def __init__(self) -> None:
        self.sent: list[dict[str, object]] = []

    def send(self, message: dict[str, object]) -> None:
        self.sent.append(message)

    def receive(self) -> dict[str, object]:
        raise EOFError


def test_the_engine_gives_an_exchange_up_before_the_ranks_do(monkeypatch):
    timeouts = []

    def meet(position: RankPosition, *, timeout_s: float, **options: Any) -> None:
        timeouts.append(timeout_s)
        raise EOFError

    monkeypatch.setattr(rank_main, "ProcessParallel", meet)
    limits, heartbeats = GroupLimits(), RankHeartbeats.create(2)
    spec = {"store_fd": 0}
    rank = rank_main._Rank(
        EngineConfig("folder", device="cpu"),
        RankPosition(0, 2, 1),
        spec,
        cast(RankConnection, ClosedConnection()),
        heartbeats,
    )
    with pytest.raises(EOFError):
        rank_main._serve(rank)
    heartbeats.close()
    assert timeouts[0] > 100 * max(limits.step_s, limits.start_s)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("the config says so"), "the config says so"),
        (FileNotFoundError("there is no folder"), "there is no folder"),
        (torch.OutOfMemoryError("CUDA out of memory"), "the GPU has too little memory"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_people_can_mend_is_refused_in_words(error, words, monkeypatch):
    def load_model(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(rank_main, "load_model", load_model)
    connection, heartbeats = ClosedConnection(), RankHeartbeats.create(2)
    rank = rank_main._Rank(
        EngineConfig("folder"), RankPosition(0, 2, 1), {}, cast(RankConnection, connection), heartbeats
    )
    with pytest.raises(EOFError):
        rank_main._prepare(rank, cast(ProcessParallel, None))
    heartbeats.close()
    [message] = connection.sent
    assert str(message["refused"]).startswith(words)
