"""Listeners are called for each exchange with the other engines, and for none while the engine is alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine_svc.model.expert_exchange import GroupExchange


class LoneMesh:
    """The only rank there is."""

    rank, size = 0, 1

    def swap_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)]

    def gather(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        return own

    def hand_back(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        return rows[None]

    def check(self) -> None: ...

    def close(self) -> None: ...


def run_step(exchange: GroupExchange) -> None:
    exchange.begin(2, 2)
    for is_last in (False, True):
        exchange.add_up(exchange.gather(torch.ones(2, 4), is_last_layer=is_last), is_last_layer=is_last)


def test_each_exchange_is_reported_but_local_computation_is_not():
    exchange, notifications = GroupExchange(0, 1), []
    exchange.enter(LoneMesh())
    exchange.subscribe(lambda: notifications.append(1))
    run_step(exchange)
    assert len(notifications) == 1 + 2 * 2
    with exchange.alone():
        run_step(exchange)
    assert len(notifications) == 1 + 2 * 2
