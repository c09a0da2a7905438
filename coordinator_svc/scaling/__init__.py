"""Changing the size of a data-parallel group. Must not know loads or topology."""
