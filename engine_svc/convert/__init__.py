"""Protos to domain objects and back, and nothing else: the only folder that knows both.
Must not know streams or sessions.
"""
