"""What can be wrong with a device rather than with a request, for who runs plans. Knows no device."""

from __future__ import annotations

import traceback


class DeviceLost(RuntimeError):
    """No step can be run any more, whatever is in it: the process has to end."""


class DeviceFull(RuntimeError):
    """A step found too little memory; one with fewer tokens may find enough."""


class PeersLost(RuntimeError):
    """Another rank of the lockstep group is gone, so that a step or a vote cannot come to its end.

    No request is to blame: all of them run again once the ranks that are left have met.
    """


def clear_frames(error: BaseException) -> None:
    """Let go of all that failed work had in hand, which may be weights; where it failed can still be told.

    Frames of a traceback and whoever keeps its error hold each other: without this, what these frames have
    would stay until a full collection, and in an engine there may never be one.
    """
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__
