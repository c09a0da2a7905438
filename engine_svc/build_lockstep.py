"""What an engine needs to share a model's experts with others. Imports torch, so that it is imported late."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine_svc.config import EngineConfig
from engine_svc.model.expert_shards import HeldExperts
from engine_svc.model.loader import has_experts

if TYPE_CHECKING:
    from engine_svc.process_groups import ProcessRankGroups

_WILDCARDS = ("0.0.0.0", "::", "[::]", "*", "")


@dataclass(frozen=True, slots=True)
class LockstepSide:
    """What the lockstep of an engine is made of, beside the machine of waves."""

    groups: ProcessRankGroups
    experts: HeldExperts


def build_experts(config: EngineConfig) -> HeldExperts | None:
    """Who holds this engine's experts. None where none are divided: the engine steps by itself."""
    if not config.divides_experts or not has_experts(Path(config.model)):
        return None
    return HeldExperts(config.data_parallel_rank, config.data_parallel_size)


def build_lockstep(config: EngineConfig, experts: HeldExperts, device: torch.device) -> LockstepSide:
    """With a store at a port that the kernel chooses, where the ranks meet whose first this engine is."""
    # Here and not above: a runner alone, as on a machine without gRPC, has nobody to vote with.
    from engine_svc.process_groups import ProcessRankGroups

    groups = ProcessRankGroups(
        experts.exchange,
        host=_reachable_host(config),
        listen=config.host,
        device=device,
        timeout_s=config.lockstep_timeout_s,
    )
    return LockstepSide(groups, experts)


def _reachable_host(config: EngineConfig) -> str:
    """By which the other engines reach this one."""
    if config.advertise_address is not None:
        host, _, port = config.advertise_address.rpartition(":")
        return (host if port.isdigit() and host else config.advertise_address).strip("[]")
    return socket.gethostname() if config.host in _WILDCARDS else config.host.strip("[]")
