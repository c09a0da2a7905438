"""One resumable connection to one engine, in layers: client > connection > session, stream.
Must not know routing or text.
"""
