"""How the process of a rank begins: bound to its parent before the slow imports, in which that may end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from engine_svc.ranks.control_pipe import end_with_parent


def main(argv: Sequence[str]) -> int:
    """As `rank_main.main`, for a process that cannot outlive its parent."""
    end_with_parent(os.getppid())
    # Here and not above: it brings torch.
    from engine_svc.build.rank_main import main as run

    return run(argv)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
