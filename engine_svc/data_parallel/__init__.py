"""Keeps data-parallel ranks in step: waves, votes, process groups, expert shards.
Must not know requests or protos.
"""
