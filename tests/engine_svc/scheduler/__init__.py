"""Tests of the scheduler. Behaviours and rows have the numbers that the specification gives them."""
