"""JSON schemas of requests: which keywords a grammar backend enforces, and what is rewritten so that it can.

Must not know requests, tokens or the engine.
"""
