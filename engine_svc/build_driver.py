"""From what was loaded to the lockstep of an engine. Imports torch, so that it is imported late."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from engine_svc.build_lockstep import LockstepSide
from engine_svc.config import EngineConfig
from engine_svc.doorbell import Doorbell
from engine_svc.facts import ModelFingerprint
from engine_svc.lockstep import VOTE_INTERVAL, WaveMachine
from engine_svc.lockstep_driver import LockstepDriver
from engine_svc.mailbox import Call
from engine_svc.served_engine import ServedEngine
from engine_svc.store_bell import reach_bell
from service_kit.config import ConfigError

# How experts are divided: each of n ranks holds a run of them, and sums are taken in the order of the ranks.
_EXPERT_RULE = "runs-1"


def build_driver(
    config: EngineConfig,
    served: ServedEngine,
    side: LockstepSide,
    fingerprint: ModelFingerprint,
    *,
    weights_digest: str,
    at_end: list[Callable[[], None]],
) -> LockstepDriver:
    """The lockstep of one engine; what ends it is put into `at_end`.

    ConfigError where nobody could tell it who the others are.
    """
    if config.coordinator is None:
        raise ConfigError("--coordinator is unset, it has to be given where experts are divided over engines")

    def post(work: Callable[[], None]) -> None:
        served.inbox.put(Call(work))

    def on_ring(wave: int) -> None:
        post(lambda: driver.hear(wave))

    driver = LockstepDriver(
        machine=WaveMachine(),
        groups=side.groups,
        shards=side.experts,
        post=post,
        parallel_config_hash=parallel_config_hash(fingerprint, config.data_parallel_group),
        weights_digest=weights_digest,
    )
    doorbell = Doorbell(
        connect=lambda meeting: reach_bell(meeting, config.lockstep_timeout_s),
        on_ring=on_ring,
        has_coordinator=lambda: served.is_member,
        clock=served.clock,
    )
    # A step takes as long as the slowest rank's: each of them is watched between its exchanges.
    side.experts.exchange.subscribe(lambda: served.board.note_progress(served.clock.now()))
    driver.subscribe(lambda standing: doorbell.move(standing, driver.meeting))
    doorbell.start()

    at_end += (driver.close, doorbell.stop, side.groups.close)
    return driver


def parallel_config_hash(fingerprint: ModelFingerprint, group: str) -> str:
    """Equal for engines that can step together, by the weights they were started with; lower-case hex."""
    parts = (fingerprint.digest, _EXPERT_RULE, str(VOTE_INTERVAL), group)
    return hashlib.sha256("".join(f"{len(part)}:{part}," for part in parts).encode()).hexdigest()
