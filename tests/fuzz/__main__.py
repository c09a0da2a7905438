"""The fuzzer by command: `python -m tests.fuzz --messages 100000 --json tests/fuzz/summary.json`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from service_kit.process import prepare_process

prepare_process("client")

from tests.fuzz.campaign import run_campaign  # noqa: E402  Its imports read what the line above has set.


def main() -> int:
    """Send messages, print how they were answered; 1 where an answer or a stream was wrong."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--messages", type=int, default=500)
    parser.add_argument("--json", type=Path, help="where to write the summary")
    arguments = parser.parse_args()
    report = asyncio.run(run_campaign(arguments.seed, arguments.messages))
    summary = json.dumps(report.as_json(), indent=1)
    print(summary)
    if arguments.json is not None:
        arguments.json.write_text(summary + "\n", encoding="utf-8")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
