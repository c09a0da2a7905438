"""Seeded messages for every public RPC, beside streams that must not change."""
