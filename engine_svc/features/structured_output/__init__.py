"""Outputs that belong to a language which the request names."""
