"""The cases for an engine, a file for each section of the specification, and one for turns.
Must not wait without a limit, nor change an engine beyond the requests of its own sessions.
"""
