"""Requests whose frontend is gone: kept by engines, taken over here.
Must not know text.
"""
