"""Runs engines as actors of a Ray cluster: creates them, finds them by name, terminates them. Needs Ray."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from triptych_cli.ray.actor import EngineActor
from triptych_cli.ray.config import RayPlaceConfig
from triptych_cli.ray.placement import EngineDied, EnginePlacement, HostLost

T = TypeVar("T")

# `triptych ray drain` finds actors by name in this namespace.
_NAMESPACE = "triptych"
# Ray's names of the strategies.
_STRATEGIES = {"spread": "SPREAD", "pack": "DEFAULT"}


class ClusterAway(Exception):
    """There is no Ray cluster at that address, or it refuses the connection."""


def connect(address: str) -> None:
    """Join the cluster as a driver; the output of our actors is shown here. Raises ClusterAway."""
    try:
        ray.init(address=address, namespace=_NAMESPACE, logging_level="warning", log_to_driver=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterAway(f"no Ray cluster at {address}: {error}") from error


def disconnect() -> None:
    """Leave the cluster; this ends the driver's actors."""
    ray.shutdown()


def find_host(name: str) -> RayHost:
    """The host of the engine of that name, also if another driver placed it. Raises HostLost if none."""
    try:
        return RayHost(ray.get_actor(name, namespace=_NAMESPACE))
    except ValueError as error:
        raise HostLost(f"there is no engine {name} on this cluster") from error


class RayCluster:
    """Creates an actor for each engine. Ray itself restarts none: `Placement` does, with backoff."""

    def __init__(self, config: RayPlaceConfig) -> None:
        self._config = config

    async def provide(self, name: str, index: int) -> RayHost:
        """A host for the engine of this name. Raises EngineDied if an actor has that name already."""
        options = {
            "name": name,
            "num_cpus": self._config.num_cpus,
            "num_gpus": self._config.num_gpus,
            "scheduling_strategy": _STRATEGIES[self._config.strategy],
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        try:
            return RayHost(ray.remote(EngineActor).options(**options).remote(name, index))
        except ValueError as error:
            raise EngineDied(f"{name} cannot be placed: {error}") from error


class RayHost:
    """An `EngineActor`, called over Ray."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    async def start(self, flags: list[str], environment: dict[str, str]) -> EnginePlacement:
        answer: EnginePlacement | str = await _answer(self._actor.start.remote(flags, environment))
        if isinstance(answer, str):
            raise EngineDied(answer)
        return answer

    async def ended(self) -> int:
        return await _answer(self._actor.ended.remote())

    async def drain(self, limit_s: float) -> int:
        return await _answer(self._actor.drain.remote(limit_s))

    async def dismiss(self) -> None:
        """Terminate the actor after its pending calls; the kernel kills an engine that still runs."""
        self._actor.__ray_terminate__.remote()


async def _answer(reference: Awaitable[T]) -> T:
    try:
        return await reference
    except RayActorError as error:
        raise HostLost(str(error).splitlines()[0]) from error
