"""Tests of the native CPU kernels."""
