"""Metrics of how long KV blocks stay in the cache."""
