"""Drawn JSON schemas, whose outputs are checked against them as they are written."""
