"""One acceptance scenario in full: python -m tests.acceptance SCENARIO [options].

Prints the scenario's tables; `--json FILE` writes them with the settings, the commit and the machine. The
exit code is 1 where a promise of the scenario is not kept.
"""

from __future__ import annotations

import sys

from benchmarks.__main__ import run_scenario
from tests.acceptance import scenarios

if __name__ == "__main__":
    sys.exit(run_scenario(scenarios, "python -m tests.acceptance", __doc__ or ""))
