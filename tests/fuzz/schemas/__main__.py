"""Drawn schemas by command: `python -m tests.fuzz.schemas --count 100000 --json FILE`.

About 50 schemas a second on one core. Outputs of random walks over a schema's masks are checked by a second
validator, and drawn instances are allowed where they are valid. With `--processes` a request to a frontend
and an engine has each schema. The exit code is 1 where there was a fault; `--first` with its seed repeats it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from triptych_kit.process.setup import prepare_process

prepare_process("client")

from benchmarks.report import current_commit, machine, report_file  # noqa: E402  After the line above.
from tests.fuzz.schemas.walks import Report, check_schema  # noqa: E402

_SHOW_EVERY = 10_000
_MAX_FAULTS = 100


def main() -> int:
    """Draw schemas, print what came of them."""
    parser = argparse.ArgumentParser(prog="tests.fuzz.schemas", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of schemas")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", action="store_true", help="through a frontend and an engine")
    parser.add_argument("--json", type=report_file, help="where to write the summary")
    arguments = parser.parse_args()
    report, began_at = Report(), time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.count)
    if arguments.processes:
        from tests.fuzz.schemas.processes import check_schemas

        asyncio.run(check_schemas(seeds, report))
    else:
        for number, seed in enumerate(seeds, 1):
            check_schema(seed, report)
            if number % _SHOW_EVERY == 0:
                print(number, len(report.faults), "faults", file=sys.stderr, flush=True)
            if len(report.faults) >= _MAX_FAULTS:
                break
    elapsed_s = time.monotonic() - began_at
    summary = {
        "command": " ".join(["python -m tests.fuzz.schemas", *sys.argv[1:]]),
        "commit": current_commit(),
        "machine": machine(),
        "elapsed_s": round(elapsed_s, 1),
        "schemas_per_s": round(report.num_schemas / elapsed_s, 1),
        **report.as_json(),
    }
    text = json.dumps(summary, indent=1)
    print(text)
    if arguments.json is not None:
        Path(arguments.json).write_text(text + "\n", encoding="utf-8")
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
