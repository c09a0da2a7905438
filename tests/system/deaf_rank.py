"""A rank whose heart beats, which takes up plans, and which never answers."""

from __future__ import annotations

import sys
from typing import Any

from engine_svc.ranks.control_pipe import RankLine, end_with_parent
from engine_svc.ranks.plan_channel import ChannelReader, reader_end
from engine_svc.ranks.progress_board import ProgressBoard, start_heart


def main() -> None:
    """Do everything a rank does but its work; rank `deaf` does not even say that it took up a plan."""
    line = RankLine(int(sys.argv[1]))
    spec: dict[str, Any] = line.hear()
    end_with_parent(spec["parent"])
    board = ProgressBoard(spec["board_fd"], spec["tp_size"] * spec["pp_size"])
    start_heart(board, spec["rank"], spec["heart_interval_s"])
    line.say({"loaded": {}})
    line.hear()
    line.say({"ready": {}})
    line.end_with_it()
    plans = ChannelReader(reader_end(spec["plans"]))
    while True:
        plans.receive()
        if spec["rank"] != spec["deaf"]:
            board.finish_step(spec["rank"])


if __name__ == "__main__":
    main()
