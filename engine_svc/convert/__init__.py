"""Converts protos to domain objects and back; the only folder that knows both.
Must not import streams or sessions.
"""
