"""A text worker that dies over its first pieces of work: `dying_worker.py DIARY NUM_DEATHS`.

It keeps to the protocol otherwise; the diary counts the deaths of all its processes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from frontend_svc.text.tokenize.id_column import id_column
from frontend_svc.text.workers.frames import FrameReader, pack_head


def main() -> None:
    diary, num_deaths = Path(sys.argv[1]), int(sys.argv[2])
    reader = FrameReader()
    while data := os.read(0, 65536):
        reader.feed(data)
        while (frame := reader.take()) is not None:
            body = b""
            if frame.text("verb") in ("encode", "check_constraint"):
                num_done = len(diary.read_text()) if diary.exists() else 0
                if num_done < num_deaths:
                    diary.write_text("x" * (num_done + 1))
                    os.abort()
                body = id_column([num_done])
            os.write(1, pack_head({}, len(body)) + body)


if __name__ == "__main__":
    main()
