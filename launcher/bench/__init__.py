"""Load generators of the command line: what `triptych bench` runs and how it counts."""
