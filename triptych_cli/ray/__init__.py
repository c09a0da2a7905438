"""Engines as actors on a Ray cluster. Must not know requests."""
