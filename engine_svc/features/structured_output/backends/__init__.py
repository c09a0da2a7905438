"""Grammar backends: from a constraint to masks of allowed tokens.

Must not know requests, steps or the wire.
"""
