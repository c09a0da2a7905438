"""Runs one service as a child that cannot outlive its launcher.

`python -m launcher.serve.child PARENT_PID SERVICE FLAGS`. A wrapper inside the child, because code between
fork and exec in a launcher that has threads is not safe.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launcher.services import main_of
from service_kit.process import die_with_parent, leave_process_group


def main(argv: Sequence[str]) -> int:
    """Bind this process's life to its parent's, then run the service."""
    parent_pid, service, *arguments = argv
    die_with_parent(int(parent_pid))
    leave_process_group()
    return main_of(service)(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
