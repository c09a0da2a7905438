"""Benchmarks of `triptych bench`: load generator, metrics and reports."""
