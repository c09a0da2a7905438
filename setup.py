"""Compiles the C++ of one extension on all cores; everything else about the package is in pyproject.toml."""

from pybind11.setup_helpers import ParallelCompile
from setuptools import setup

ParallelCompile("TRIPTYCH_BUILD_JOBS").install()
setup()
