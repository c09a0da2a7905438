"""What can be wrong with a device rather than with a request, for who runs plans. Knows no device."""

from __future__ import annotations


class DeviceLost(RuntimeError):
    """No step can be run any more, whatever is in it: the process has to end."""


class DeviceFull(RuntimeError):
    """A step found too little memory; one with fewer tokens may find enough."""


class PeersLost(RuntimeError):
    """Another rank of the lockstep group is gone, so that a step or a vote cannot come to its end.

    No request is to blame: all of them run again once the ranks that are left have met.
    """
