"""Announcements and statistics of the engine, and the utility calls of operators and frontends.
asyncio side. Must not import the scheduler or tensors.
"""
