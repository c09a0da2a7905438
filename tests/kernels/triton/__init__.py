"""Tests of the Triton kernels: compiled where there is a GPU, else in Triton's interpreter.

Every op of the table has a `test_<op>_equals_the_reference`, parametrised with `shape`, and test_coverage.py
checks that.
"""
