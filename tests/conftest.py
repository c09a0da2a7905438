"""What must be settled before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

# Triton decides how it runs kernels when it is first imported, which transformers does, too.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
