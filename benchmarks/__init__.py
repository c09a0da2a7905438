"""One script a question; each prints a table and takes `--json FILE` for `benchmarks.report`."""
