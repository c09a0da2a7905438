"""Adoption: the requests of a lost session and their outputs are kept until another session takes them over.
Orphaned requests are asyncio side, detached outputs engine thread. Must not know streams or scheduling.
"""
