"""Turns the columns of step messages into the output deltas of each request."""
