"""A pytest plugin: this CPU has AVX2 and nothing wider. `python -m pytest -p tests.avx2_cpu FILES`.

Torch, oneDNN and the native kernels each ask the CPU for themselves.
"""

from __future__ import annotations

import os

# Read when torch is imported.
os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"


def pytest_configure() -> None:
    """Limit the native kernels."""
    try:
        from triptych_kernels.cpu import _native
    except ImportError:
        return
    supports = _native.supports
    _native.supports = lambda isa: supports(isa) and isa == "avx2"


def pytest_report_header() -> str:
    """What computes."""
    import torch

    from triptych_kernels import ops_for

    capability = torch.backends.cpu.get_cpu_capability()
    return f"cpu: torch {capability}, ops {ops_for(torch.device('cpu')).name}"
