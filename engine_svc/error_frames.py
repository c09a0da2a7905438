"""What the frames of an error hold. Knows no device and no wire."""

from __future__ import annotations

import traceback


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
