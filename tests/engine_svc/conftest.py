"""Engines that run in these tests are guarded against other threads."""

from tests.one_owner import guarded_engines, one_owner

__all__ = ["guarded_engines", "one_owner"]
