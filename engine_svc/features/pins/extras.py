"""The job of an ADD, hints about its turns, and calls of operators. None reaches the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import Extra


@dataclass(frozen=True, slots=True)
class JobTurn(Extra):
    """A request that is a turn of a job.

    tool: that its output is expected to call; "": not known.  has_siblings: other requests continue the same
    prompt, of which the next turn continues one.  job_id, tenant: as the ADD has them.
    """

    is_last: bool = False
    tool: str = ""
    has_siblings: bool = False
    job_id: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class FinishHint(Extra):
    """The tool that the output of a turn, which has ended, calls.

    tool: the first that it calls; "": none; None: not known.
    """

    tool: str | None


@dataclass(frozen=True, slots=True)
class PinInfo:
    """One pin at one moment.

    left_s: 0 once it lasts only until the waiting turn of its job runs.
    """

    pin_id: str
    num_blocks: int
    left_s: float
    job_id: str
    tenant: str


@dataclass(slots=True)
class PinPrefix(Extra):
    """An operator's call: pin the cached blocks of these tokens.

    ttl_s: 0 for the default.  pin or failure: the answer.
    """

    token_ids: list[int]
    ttl_s: float
    job_id: str
    cache_salt: str
    tenant: str
    pin: PinInfo | None = None
    failure: RequestFailed | None = None


@dataclass(slots=True)
class ReleasePins(Extra):
    """An operator's call: release pins by id, by job, or all of them where both are empty.

    num_pins, num_blocks: the answer, how many were released, and how many blocks are in no pin any more.
    """

    pin_id: str = ""
    job_id: str = ""
    num_pins: int = 0
    num_blocks: int = 0


@dataclass(slots=True)
class ListPins(Extra):
    """An operator's call.  pins: the answer, the soonest to expire first."""

    pins: list[PinInfo] = field(default_factory=list)


EXTRAS = ()
