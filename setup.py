"""Compiles the C++ of one extension on several cores. Everything else is in pyproject.toml."""

import os

from setuptools import setup

_MAX_JOBS = 4  # each takes up to 1 GiB

try:
    from pybind11.setup_helpers import ParallelCompile
except ImportError:
    # Without build isolation pybind11 may be missing: then one file after the other.
    pass
else:
    ParallelCompile(default=min(_MAX_JOBS, os.cpu_count() or 1)).install()

setup()
