"""Takes back what was planned where it yields nothing. Knows no errors and no steps to come."""

from __future__ import annotations

from collections.abc import Sequence

from engine_svc.cache.kv_cache import KVCache
from engine_svc.request import Request, RequestStatus
from engine_svc.scheduler.hook import SchedulerHook
from engine_svc.scheduler.in_flight import StepsInFlight
from engine_svc.scheduler.roster import Roster


def withdraw_steps(
    in_flight: StepsInFlight, roster: Roster, kv_cache: KVCache, hooks: Sequence[SchedulerHook], now: float
) -> None:
    """Queue the requests of all steps in flight again, without blocks, the first admitted before the others.

    What these steps were to compute can not be found any more; what was computed before them still can.
    """
    withdrawn = in_flight.withdraw()
    roster.release_again(withdrawn.released)
    # The last first: whoever gives way is mostly the next to be taken again.
    for request in reversed(roster.running.copy()):
        if request in withdrawn.rows:
            preempt_settled(roster, request, now)
    # Behind the releases: a block that one request fills may have been taken over by another already.
    kv_cache.disown([*withdrawn.block_ids, *kv_cache.take_registered()])
    for hook in hooks:
        hook.on_withdraw()


def preempt_settled(roster: Roster, request: Request, now: float) -> None:
    """Queue a running request again, for which nothing is in flight."""
    assert request.status is RequestStatus.RUNNING, f"request {request.request_id} does not run"
    request.resumes_after_step = 0
    roster.preempt(request, now, 0)
