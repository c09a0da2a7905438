"""Policies by name: which request is served first, and which is preempted. Unknown to the scheduler."""

from engine_svc.scheduler.policies.continuum import Continuum
from engine_svc.scheduler.policies.fair import Fair
from engine_svc.scheduler.policies.fcfs import FirstComeFirstServed
from engine_svc.scheduler.policies.least_recompute import LeastRecompute
from engine_svc.scheduler.policies.prefill_first import PrefillFirst
from engine_svc.scheduler.policies.priority import ByPriority
from engine_svc.scheduler.policy import PolicyFactory

POLICIES: dict[str, PolicyFactory] = {
    "fcfs": FirstComeFirstServed,
    "fair": Fair,
    "priority": ByPriority,
    "prefill-first": PrefillFirst,
    "least-recompute": LeastRecompute,
    "continuum": Continuum,
}
