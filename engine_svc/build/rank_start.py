"""Entry point of a rank's process: binds it to its parent, which may end during the slow imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from engine_svc.ranks.control_pipe import end_with_parent


def main(argv: Sequence[str]) -> int:
    """Run `rank_main.main` in a process that cannot outlive its parent."""
    end_with_parent(os.getppid())
    # Imported here: it imports torch.
    from engine_svc.build.rank_main import main as run

    return run(argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
