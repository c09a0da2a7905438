"""Limits how many rows are delivered in a turn of the event loop, over all engines. Knows no rows."""

from __future__ import annotations

import asyncio

# Each row has a reader that writes to its client in the same turn, which takes 50 us and more.
MAX_ROWS_A_TURN = 64
# A row that ends a request has a reader that completes an answer, with its log line, metrics and span, and
# often a client that sends the next request: 0.5 to 2 ms.
COST_OF_END = 4
# gRPC accepts one call in so many turns, so that one more begins for each `MAX_ROWS_A_TURN` rows.
_NUM_TURNS = 2


class DeliveryPace:
    """Has turns of the event loop pass between rows, so that calls are accepted however many rows there are.

    The rows of short steps are added up: what turns cost is in proportion to rows. `COST_OF_END` of these are
    counted for a row that ends a request.
    """

    def __init__(self) -> None:
        self._num_rows = 0  # since the last turns that passed here
        self._lock = asyncio.Lock()  # held while turns pass: engines follow in the order in which they came

    async def take(self, num_rows: int) -> None:
        """Wait until so many rows may be delivered; they are to be before the caller's next await."""
        async with self._lock:
            if self._num_rows + num_rows > MAX_ROWS_A_TURN:
                for _ in range(_NUM_TURNS):
                    await asyncio.sleep(0)
                self._num_rows = 0
            self._num_rows += num_rows
