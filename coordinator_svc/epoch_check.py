"""Whether whoever registers knows a coordinator that was started after this one. Knows no streams."""

from __future__ import annotations

import logging
from collections import OrderedDict

from service_kit.errors import FailedPrecondition

logger = logging.getLogger(__name__)

MAX_NOTED = 4096


class EpochCheck:
    """Refuses those who have heard of a later coordinator; they come again until their claim has lapsed."""

    def __init__(self, own_epoch: int) -> None:
        self.num_refused = 0
        self._own_epoch = own_epoch
        self._noted: OrderedDict[str, int] = OrderedDict()  # with the epoch that each knew

    def check(self, who: str, known: int) -> None:
        """Raise FailedPrecondition where `who` knows of a later epoch than this coordinator's."""
        if known <= self._own_epoch:
            self._noted.pop(who, None)
            return
        self.num_refused += 1
        # Once, as they ask every second.
        if self._noted.get(who) != known:
            self._note(who, known)
            fields = {"who": who, "epoch": known, "own_epoch": self._own_epoch}
            logger.error("a newer coordinator is known", extra=fields)
        raise FailedPrecondition(
            f"{who} knows coordinator epoch {known}, this coordinator has {self._own_epoch}: it is taken here"
            " when it has not heard of the other one for the time of a lease",
            reason="STALE_COORDINATOR",
        )

    def _note(self, who: str, known: int) -> None:
        self._noted[who] = known
        self._noted.move_to_end(who)
        while len(self._noted) > MAX_NOTED:
            self._noted.popitem(last=False)
