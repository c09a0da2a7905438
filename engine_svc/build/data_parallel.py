"""Builds the lockstep of an engine with the other data-parallel ranks. Imports torch: import it late."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine_svc.config import EngineConfig
from engine_svc.core.facts import ModelFingerprint
from engine_svc.data_parallel.expert_shards import HeldExperts
from engine_svc.model.loading.loader import has_experts
from triptych_kit.addresses import is_wildcard, split_address
from triptych_kit.config import ConfigError

if TYPE_CHECKING:
    from engine_svc.admin.served_engine import ServedEngine
    from engine_svc.data_parallel.driver import LockstepDriver
    from engine_svc.data_parallel.torch_group import ProcessRankGroups

# How experts are sharded: each of n ranks holds a contiguous range, and sums are taken in rank order.
_EXPERT_RULE = "runs-1"


@dataclass(frozen=True, slots=True)
class LockstepSide:
    """The device-side parts of an engine's lockstep."""

    groups: ProcessRankGroups
    experts: HeldExperts


def build_experts(config: EngineConfig) -> HeldExperts | None:
    """The experts held by this engine. None if they are not sharded: the engine steps alone."""
    if not config.divides_experts or not has_experts(Path(config.model)):
        return None
    return HeldExperts(config.data_parallel_rank, config.data_parallel_size)


def build_lockstep(config: EngineConfig, experts: HeldExperts, device: torch.device) -> LockstepSide:
    """Build the process groups, with a store at a port that the kernel chooses; rank 0's store is used."""
    # Imported here: a runner alone, e.g. on a machine without gRPC, needs no process groups.
    from engine_svc.data_parallel.torch_group import ProcessRankGroups

    groups = ProcessRankGroups(
        experts.exchange,
        host=_reachable_host(config),
        listen=config.host,
        device=device,
        timeout_s=config.lockstep_timeout_s,
    )
    return LockstepSide(groups, experts)


def build_driver(
    config: EngineConfig,
    served: ServedEngine,
    side: LockstepSide,
    fingerprint: ModelFingerprint,
    *,
    weights_digest: str,
    at_end: list[Callable[[], None]],
) -> LockstepDriver:
    """The lockstep of one engine; its cleanup functions are appended to `at_end`.

    Raises ConfigError without a coordinator, which is what forms the group.
    """
    # Imported here: a runner alone needs no lockstep and no gRPC, which these import.
    from engine_svc.data_parallel.driver import LockstepDriver
    from engine_svc.data_parallel.wake_signal import WakeSignal, connect_signal_store
    from engine_svc.data_parallel.wave import WaveMachine
    from engine_svc.loop.mailbox import Call

    if config.coordinator is None:
        raise ConfigError("--coordinator is unset, it has to be set where experts are divided over engines")

    def post(work: Callable[[], None]) -> None:
        served.inbox.put(Call(work))

    def on_signal(wave: int) -> None:
        post(lambda: driver.on_wake_signal(wave))

    driver = LockstepDriver(
        machine=WaveMachine(),
        groups=side.groups,
        shards=side.experts,
        post=post,
        parallel_config_hash=parallel_config_hash(fingerprint, config.data_parallel_group),
        weights_digest=weights_digest,
    )
    wake_signal = WakeSignal(
        connect=lambda meeting: connect_signal_store(meeting, config.lockstep_timeout_s),
        on_signal=on_signal,
        has_coordinator=lambda: served.is_member,
        clock=served.clock,
    )
    # A step takes as long as that of the slowest rank: hangs are detected between exchanges.
    side.experts.exchange.subscribe(lambda: served.stats_snapshot.note_progress(served.clock.now()))
    driver.subscribe(lambda rank_status: wake_signal.move(rank_status, driver.meeting))
    wake_signal.start()

    at_end += (driver.close, wake_signal.stop, side.groups.close)
    return driver


def parallel_config_hash(fingerprint: ModelFingerprint, group: str) -> str:
    """Equal for engines that can step together, given their weights at start; lower-case hex."""
    from engine_svc.data_parallel.wave import VOTE_INTERVAL

    parts = (fingerprint.digest, _EXPERT_RULE, str(VOTE_INTERVAL), group)
    return hashlib.sha256("".join(f"{len(part)}:{part}," for part in parts).encode()).hexdigest()


def _reachable_host(config: EngineConfig) -> str:
    """The host name at which the other engines reach this one."""
    if config.advertise_address is not None:
        try:
            return split_address(config.advertise_address)[0]
        except ValueError:  # a host alone
            return config.advertise_address.strip("[]")
    return socket.gethostname() if is_wildcard(config.host) else config.host.strip("[]")
