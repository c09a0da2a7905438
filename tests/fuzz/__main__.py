"""The fuzzer by command: `python -m tests.fuzz --seeds 10 --messages 10000 --json summary.json`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from triptych_kit.process.setup import prepare_process

prepare_process("client")

from tests.fuzz.campaign import run_campaign  # noqa: E402  Its imports read what the line above has set.


def main() -> int:
    """Send messages, print how they were answered; 1 where an answer or a stream was wrong."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1, help="how many runs, each with a frontend of its own")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--messages", type=int, default=500, help="of each run")
    parser.add_argument("--json", type=Path, help="where to write the summary, after each run")
    arguments = parser.parse_args()
    summaries, is_fine = [], True
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        report = asyncio.run(run_campaign(seed, arguments.messages))
        is_fine = is_fine and not report.faults
        summaries.append(report.as_json())
        print(json.dumps(summaries[-1], indent=1), flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(summaries, indent=1) + "\n", encoding="utf-8")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
