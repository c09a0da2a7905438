"""Recorded decisions of a reference scheduler, replayed."""
