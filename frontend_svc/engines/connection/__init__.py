"""One resumable connection to one engine.
Must not know routing or text.
"""
