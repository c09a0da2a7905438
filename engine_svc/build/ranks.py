"""Builds a model that is divided over processes. Imported late, by `build.engine` alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from engine_svc.build.features import extra_types
from engine_svc.build.runner import Progress, RunnerSide, size_cache
from engine_svc.config import EngineConfig
from engine_svc.model.facts import KVShape, ModelFacts, StateShape, groups_of_stage
from engine_svc.model.process_parallel import RankPosition
from engine_svc.ranks.control_pipe import RankMessage
from engine_svc.ranks.process_group import GroupLimits, ProcessGroup, RankLaunch, RanksStarting
from engine_svc.ranks.watch import RankLost
from engine_svc.runner.control import RunnerControl
from engine_svc.runner.memory.kv_sizing import FreeMemory, warn_if_cut
from engine_svc.runner.preparer import OnPrepared
from triptych_kit.config import ConfigError
from triptych_kit.process.setup import importing_environment

_RANK_MODULE = "engine_svc.build.rank_main"


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's report of its part of the model."""

    facts: ModelFacts
    num_bytes: int
    free: FreeMemory
    device: str
    kernel_mode: str


@dataclass(frozen=True, slots=True)
class RankedSide:
    """The side that runs plans, and the size of each rank's part of the model."""

    side: RunnerSide
    group: ProcessGroup
    num_bytes: tuple[int, ...]  # parameter bytes of each rank


def build_ranks(
    config: EngineConfig,
    progress: Progress,
    *,
    limits: GroupLimits | None = None,
    on_lost: Callable[[RankLost], object] = lambda lost: None,
    on_prepared: OnPrepared = lambda number, failure: None,
) -> RankedSide:
    """Start the ranks, and size their caches by the one with the least room.

    on_lost: called on another thread when a rank is lost, also between steps. on_prepared: likewise, with
    the answers of ranks that prepare.
    Raises ValueError with a message for the operator, RankLost, or TimeoutError.
    """
    positions = _rank_positions(config)
    _check_devices(config, len(positions))
    starting = RanksStarting(
        positions,
        RankLaunch(
            _RANK_MODULE, {"config": asdict(_config_of_ranks(config, len(positions)))}, _environment()
        ),
        limits=limits or GroupLimits(),
        on_lost=on_lost,
        on_prepared=on_prepared,
        on_progress=progress,
    )
    loaded_messages = starting.loaded()
    try:
        parts = _with_stage_groups(positions, [_part(message) for message in loaded_messages])
        max_model_len, num_kv_blocks, num_state_slots = _size(config, parts)
    except Exception:
        starting.give_up()
        raise
    shapes = _all_shapes(positions, parts)
    settings = [
        {
            "max_model_len": max_model_len,
            "num_kv_blocks": num_kv_blocks,
            "num_state_slots": num_state_slots,
            "kv_shapes": [asdict(shape) for shape in shapes],
            "first_layer": _first_layer(position, positions, parts),
        }
        for position in positions
    ]
    model = replace(
        parts[0].facts,
        kv_shapes=shapes,
        stage_groups=None,
        num_parameters=sum(part.facts.num_parameters for part in parts),
    )
    group = starting.finish(
        settings,
        max_num_seqs=config.max_num_seqs,
        # Of layers with attention, and the one of layers with states.
        num_groups=len(model.groups) + bool(num_state_slots),
        extras=extra_types(),
    )
    side = RunnerSide(
        executor=group,
        control=RunnerControl(group),
        preparing=group,
        model=model,
        max_model_len=max_model_len,
        num_kv_blocks=num_kv_blocks,
        num_state_slots=num_state_slots,
        steps_in_flight=max(config.steps_in_flight, config.pipeline_parallel_size),
        # Sums over tensor-parallel ranks round differently from those of one; pipeline stages change nothing.
        kernel_mode=joint_kernel_mode([part.kernel_mode for part in parts])
        + f"-tp{config.tensor_parallel_size}"
        + ("-ep" if config.expert_parallel else ""),
        rank_ids=tuple(group.process_ids),
    )
    return RankedSide(side, group, tuple(part.num_bytes for part in parts))


def joint_kernel_mode(modes: Sequence[str]) -> str:
    """The mode of ranks of one model: a rank that has no quantized weights names no rounding for them."""
    return max(modes, key=len)


def _rank_positions(config: EngineConfig) -> list[RankPosition]:
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    return [RankPosition(rank, tp_size, pp_size, config.expert_parallel) for rank in range(tp_size * pp_size)]


def _check_devices(config: EngineConfig, num_ranks: int) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device is cuda, but torch finds no CUDA device here")
    if config.device == "cpu" or not torch.cuda.is_available():
        return
    num_gpus = torch.cuda.device_count()
    if num_gpus < num_ranks:
        raise ConfigError(
            f"--tensor-parallel-size {config.tensor_parallel_size} times --pipeline-parallel-size "
            f"{config.pipeline_parallel_size} need {num_ranks} GPUs, but there are {num_gpus}; lower them, "
            "or choose --device cpu"
        )


def _config_of_ranks(config: EngineConfig, num_ranks: int) -> EngineConfig:
    num_cpus = len(os.sched_getaffinity(0))
    return replace(
        config,
        # Ranks compute at the same time, so they share the CPUs; one is left to the engine's own thread.
        num_threads=config.num_threads or max(1, (num_cpus - 1) // num_ranks),
        # Communication between ranks cannot be recorded in a CUDA graph.
        cuda_graphs=False,
    )


def _environment() -> dict[str, str]:
    """Environment of the ranks: this process's module path, and gloo on the loopback interface."""
    environment = importing_environment()
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _part(message: RankMessage) -> _Part:
    fields: dict[str, Any] = message
    facts = fields["facts"]
    facts["kv_shapes"] = tuple(KVShape(**shape) for shape in facts["kv_shapes"])
    facts["state_shapes"] = tuple(
        StateShape(tuple(tuple(part) for part in shape["parts"])) for shape in facts["state_shapes"]
    )
    facts["eos_token_ids"] = tuple(facts["eos_token_ids"])
    facts["expert_choices"] = tuple(facts["expert_choices"])
    return _Part(
        ModelFacts(**facts),
        fields["num_bytes"],
        FreeMemory(fields["free_bytes"], fields["free_how"]),
        fields["device"],
        fields["kernel_mode"],
    )


def _all_shapes(positions: list[RankPosition], parts: list[_Part]) -> tuple[KVShape, ...]:
    """KV shapes of the layers of all stages, taken from one rank of each stage."""
    return tuple(
        shape
        for position, part in zip(positions, parts, strict=True)
        if position.tp_rank == 0
        for shape in part.facts.kv_shapes
    )


def _first_layer(position: RankPosition, positions: list[RankPosition], parts: list[_Part]) -> int:
    """Index of the first layer of this rank's stage in the whole model."""
    return sum(
        part.facts.num_layers
        for other, part in zip(positions, parts, strict=True)
        if other.tp_rank == 0 and other.pp_rank < position.pp_rank
    )


def _with_stage_groups(positions: list[RankPosition], parts: list[_Part]) -> list[_Part]:
    """Put each stage's layers into the groups of the whole model, whose block tables every stage has."""
    shapes = _all_shapes(positions, parts)
    grouped = []
    for position, part in zip(positions, parts, strict=True):
        first = _first_layer(position, positions, parts)
        groups = groups_of_stage(shapes, first, first + part.facts.num_layers)
        grouped.append(replace(part, facts=replace(part.facts, stage_groups=groups)))
    return grouped


def _size(config: EngineConfig, parts: list[_Part]) -> tuple[int, int, int]:
    """Maximum model length, and the numbers of blocks and of state slots that every rank has room for."""
    in_flight = max(config.steps_in_flight, config.pipeline_parallel_size)
    config = replace(config, steps_in_flight=in_flight)
    if parts[0].device == "cpu":
        # The ranks share the host's memory.
        parts = [_with_share(part, len(parts)) for part in parts]
        if config.kv_cache_memory is not None:
            config = replace(config, kv_cache_memory=config.kv_cache_memory // len(parts))
        if config.state_cache_memory is not None:
            config = replace(config, state_cache_memory=config.state_cache_memory // len(parts))
    lengths = [size_cache(config, part.facts, part.free)[0] for part in parts]
    config = replace(config, max_model_len=min(lengths))
    sizings = [size_cache(config, part.facts, part.free)[1] for part in parts]
    if config.num_kv_blocks is None and config.kv_cache_memory is not None:
        warn_if_cut(config.kv_cache_memory * len(parts), sizings)
    num_blocks = min(sizing.num_blocks for sizing in sizings)
    return min(lengths), num_blocks, min(sizing.num_state_slots for sizing in sizings)


def _with_share(part: _Part, num_ranks: int) -> _Part:
    free = FreeMemory(part.free.num_bytes // num_ranks, f"a part in {num_ranks} of {part.free.how}")
    return replace(part, free=free)
