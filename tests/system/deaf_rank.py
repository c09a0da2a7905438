"""A rank whose heart beats, which takes up plans, and which never answers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from engine_svc.ranks.control_pipe import RankConnection
from engine_svc.ranks.plan_channel import ChannelReader, reader_end
from engine_svc.ranks.progress_board import RankHeartbeats, start_heart


def main(argv: Sequence[str]) -> int:
    """Do everything a rank does but its work; rank `deaf` does not even say that it took up a plan."""
    connection = RankConnection(socket.socket(fileno=int(argv[0])))
    spec: dict[str, Any] = connection.receive()
    heartbeats = RankHeartbeats(spec["board_fd"], spec["tp_size"] * spec["pp_size"])
    start_heart(heartbeats, spec["rank"], spec["heart_interval_s"])
    connection.send({"loaded": {}})
    connection.receive()
    connection.send({"ready": {}})
    connection.end_with_it()
    plans = ChannelReader(reader_end(spec["plans"]))
    while True:
        plans.receive()
        if spec["rank"] != spec["deaf"]:
            heartbeats.finish_step(spec["rank"])
