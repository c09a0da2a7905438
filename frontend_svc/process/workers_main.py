"""Entry point of a worker: a frontend process that dies with its parent.

`python -m frontend_svc.process.workers_main PARENT_PID FLAGS`. A wrapper inside the child, because running
code between fork and exec in a parent is not safe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from frontend_svc.main import main as run_frontend
from service_kit.process import die_with_parent, leave_process_group


def main(argv: Sequence[str]) -> int:
    """Arrange to die with the parent, then run a frontend."""
    parent_pid, *flags = argv
    die_with_parent(int(parent_pid))
    leave_process_group()
    return run_frontend(flags)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
