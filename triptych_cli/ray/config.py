"""Options of `triptych ray index`: its own, and those of every engine. Imports no Ray."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from triptych_cli.arguments import with_model
from triptych_cli.flags import split_flags
from triptych_cli.services import config_of
from triptych_kit.config import ConfigError, load_config, option

# Flags that the placement sets for each engine; a user's value would contradict it.
RESERVED = frozenset(
    {
        "--announce-fd",
        "--index",
        "--host",
        "--port",
        "--admin-port",
        "--advertise-address",
        "--data-parallel-rank",
    }
)
_MAX_ENGINES = 1024
# Set from Ray's assignment; a user's value could select devices of others.
_DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class RayPlaceConfig:
    """Engines as actors of a Ray cluster. Coordinator and frontends run elsewhere."""

    coordinator: str = option(help="host:port of the coordinator, as the cluster's nodes reach it")
    model: str | None = option(None, help="model folder; without it the embedded model", positional=True)
    ray_address: str = option("auto", help="host:port of the Ray cluster's head; auto: the one of this node")
    num_engines: int = option(1, help="engines to place, each an actor of its own")
    num_cpus: float = option(1.0, help="CPUs that Ray sets aside for an engine; also its threads")
    num_gpus: float = option(0.0, help="GPUs that Ray sets aside for an engine, and all that it sees")
    strategy: str = option(
        "spread", choices=("spread", "pack"), help="over as many nodes as there are, or as few as will do"
    )
    base_port: int = option(0, help="port of the first engine, the next has the next; 0: free ones")
    name: str = option("engine", help="beginning of the actors' names, to which the rank is added")
    first_rank: int = option(0, help="data-parallel rank of the first engine")
    data_parallel_size: int | None = option(
        None, help="engines of the group, those placed elsewhere included (default: up to the last one here)"
    )
    env: tuple[str, ...] = option((), help="NAME=VALUE for the engines' environment")
    ready_file: str | None = option(
        None, help="file for addresses and pids as JSON, from when all is ready until the stop"
    )
    startup_timeout_s: float = option(600.0, help="time for everything to be placed and ready, in s")
    drain_deadline_s: float = option(20.0, help="time for running requests to end at a stop, in s")

    def __post_init__(self) -> None:
        if not 1 <= self.num_engines <= _MAX_ENGINES:
            raise ValueError(f"num_engines is {self.num_engines}, the range is 1..{_MAX_ENGINES}")
        for name in ("num_cpus", "num_gpus", "first_rank", "drain_deadline_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, the least is 0, and it has an end")
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise ValueError(f"num_gpus is {self.num_gpus:g}: a part of a GPU is for engines that need one")
        last_port = self.base_port + self.num_engines - 1
        if self.base_port and (self.base_port < 0 or last_port > 65535):
            raise ValueError(f"base_port is {self.base_port}: ports up to {last_port} are not to be had")
        if self.group_size > _MAX_ENGINES:
            raise ValueError(f"data_parallel_size is {self.group_size}, the limit is {_MAX_ENGINES}")
        if self.group_size < self.first_rank + self.num_engines:
            raise ValueError(
                f"data_parallel_size is {self.group_size}, the ranks placed end at"
                f" {self.first_rank + self.num_engines - 1}"
            )
        if self.startup_timeout_s <= 0:
            raise ValueError("startup_timeout_s must be above 0")
        # Checked here, not when the first engine starts on some node.
        self.environment()

    @property
    def group_size(self) -> int:
        """The size of the group, including engines placed elsewhere."""
        if self.data_parallel_size is None:
            return self.first_rank + self.num_engines
        return self.data_parallel_size

    def environment(self) -> dict[str, str]:
        """The variables of `--env` by name. Raises ValueError for an entry without a name."""
        entries: dict[str, str] = {}
        for entry in self.env:
            name, equals, value = entry.partition("=")
            if not name or not equals:
                raise ValueError(f"env is {entry!r}, it has to be NAME=VALUE")
            if name == _DEVICES_VARIABLE:
                raise ValueError(f"env names {name}, which Ray decides: use --num-gpus")
            entries[name] = value
        return entries


@dataclass(frozen=True, slots=True)
class Placing:
    """Parsed arguments: the verb's own options, and the flags of all engines."""

    config: RayPlaceConfig
    engine_flags: tuple[str, ...]

    def name_of(self, index: int) -> str:
        """The name of the engine with this index, and of its actor."""
        return f"{self.config.name}-{self.config.first_rank + index}"

    def flags_of(self, index: int, port: int = 0) -> list[str]:
        """The arguments of one engine, without its host. `port` 0: the configured one, or a free one."""
        config = self.config
        configured = config.base_port + index if config.base_port else 0
        return [
            *self.engine_flags,
            f"--port={port or configured}",
            f"--coordinator={config.coordinator}",
            f"--data-parallel-rank={config.first_rank + index}",
            f"--data-parallel-size={config.group_size}",
            f"--drain-deadline-s={config.drain_deadline_s}",
        ]


def parse_place(argv: Sequence[str]) -> Placing:
    """Read the arguments of `ray index`, in which a flag that is not its own is every engine's.

    Raises ConfigError.
    """
    for argument in argv:
        spelling = argument.partition("=")[0]
        if spelling in RESERVED:
            raise ConfigError(f"{spelling} is set by the placement for each engine")
    own, flags = split_flags(argv, RayPlaceConfig, {"engine": config_of("engine")}, reserved=RESERVED)
    config = load_config(RayPlaceConfig, own, service="ray").config
    # Actors run in another working directory.
    model = os.path.abspath(config.model) if config.model and os.path.exists(config.model) else config.model
    engine = with_model([*([model] if model else []), *flags["engine"]])
    # Checked here, because an engine on some node would report it only minutes later.
    fixed_flags = (f"--data-parallel-size={config.group_size}",)
    origins = load_config(config_of("engine"), [*engine, *fixed_flags], service="engine").origins
    if origins["num_threads"] == "default":
        # An engine would use all CPUs of the machine, not only those that Ray has reserved.
        engine.append(f"--num-threads={max(1, int(config.num_cpus))}")
    return Placing(config, tuple(engine))
