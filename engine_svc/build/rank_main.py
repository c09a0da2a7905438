"""Main of one rank's process: loads its part of the model and runs plans until the engine closes the channel.

Knows no requests and no wire.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from engine_svc.build.features import extra_types, reserved_bytes
from engine_svc.build.runner import (
    GPU_IS_FULL,
    free_memory,
    kernel_mode,
    load_options,
    make_runner,
)
from engine_svc.build.speculation import make_proposer
from engine_svc.config import EngineConfig
from engine_svc.core.errors import RequestFailed
from engine_svc.core.extras import ExtraCodec
from engine_svc.model.facts import KVShape, groups_of_stage
from engine_svc.model.loading.loader import LoadedModel, load_model
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.process_parallel import ProcessParallel, RankPosition
from engine_svc.ranks.control_pipe import RankConnection, write_prepared
from engine_svc.ranks.loop import AfterStep, EarlyStage, RankLoop, Reporter, Silent
from engine_svc.ranks.plan_channel import ChannelReader, ChannelWriter, reader_end, writer_end
from engine_svc.ranks.plan_codec import PlanDecoder
from engine_svc.ranks.progress_board import RankHeartbeats, start_heart
from engine_svc.ranks.state_digest import batch_digest, sampler_digest
from engine_svc.runner.control import runner_calls
from engine_svc.runner.executor import Call
from engine_svc.runner.memory.kv_tensors import KVSizing, bytes_per_block
from engine_svc.runner.model_runner import ModelRunner
from triptych_kit.plugins import load_plugins
from triptych_kit.process.setup import set_title
from triptych_kit.process.stacks import write_when_asked
from triptych_kit.telemetry.logs import setup_logs

# A rank with a GPU polls for its next plan this long before it sleeps: waking up takes longer.
_SPIN_S = 50e-6
_PROGRESS_INTERVAL_S = 0.1
# Effectively unlimited: the engine decides how long a step may take, and excludes the time in which all
# processes were stopped, which the timeouts of gloo and NCCL do not.
_EXCHANGE_S = 7 * 86_400.0


def main(argv: Sequence[str]) -> int:
    """Run a rank. The only argument is the file descriptor of its control pipe, which carries the rest."""
    connection = RankConnection(socket.socket(fileno=int(argv[0])))
    spec: dict[str, Any] = connection.receive()
    write_when_asked()
    config = EngineConfig(**spec["config"])
    position = RankPosition(spec["rank"], spec["tp_size"], spec["pp_size"], spec["divides_experts"])
    set_title("engine", config.index, "rank", position.rank)
    setup_logs(
        "engine",
        instance=f"{config.index}/rank-{position.rank}",
        log_format=config.log_format,
        log_level=config.log_level,
    )
    heartbeats = RankHeartbeats(spec["board_fd"], position.num_ranks)
    start_heart(heartbeats, position.rank, spec["heart_interval_s"])
    try:
        load_plugins(config.plugins)
        _serve(_Rank(config, position, spec, connection, heartbeats))
    except EOFError:
        # The engine ended before this rank was ready, and reports why.
        return 0
    except Exception as error:
        _send_failure(connection, error)
        raise
    return 0


def _send_failure(connection: RankConnection, error: Exception) -> None:
    with contextlib.suppress(EOFError):
        connection.send({"failed": f"raised {type(error).__name__}", "details": str(error)})


@dataclass(frozen=True, slots=True)
class _Rank:
    config: EngineConfig
    position: RankPosition
    spec: dict[str, Any]
    connection: RankConnection
    heartbeats: RankHeartbeats


def _serve(rank: _Rank) -> None:
    device = _choose_device(rank)
    parallel = ProcessParallel(
        rank.position,
        store_path=f"/proc/self/fd/{rank.spec['store_fd']}",
        device=device,
        timeout_s=_EXCHANGE_S,
    )
    loop = _prepare(rank, parallel)
    rank.connection.send({"ready": {}})
    rank.connection.end_with_it()
    loop.run()
    parallel.close()


def _prepare(rank: _Rank, parallel: ProcessParallel) -> RankLoop:
    """Load the rank's part; errors that an operator can fix are sent to the engine as a refusal."""
    try:
        return _load(rank, parallel)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        is_full = isinstance(error, torch.OutOfMemoryError)
        rank.connection.send({"refused": GPU_IS_FULL if is_full else str(error)})
        # The engine ends this process.
        rank.connection.receive()
        raise


def _load(rank: _Rank, parallel: ProcessParallel) -> RankLoop:
    """Load, report the facts, and build the loop with the sizes that the engine replies with.

    Keeps no reference to the model.
    """
    options = load_options(rank.config)
    loaded = load_model(rank.config.model, options, parallel=parallel, progress=_progress(rank))
    proposer = make_proposer(rank.config, loaded, options)
    reserved = proposer.num_bytes + reserved_bytes(rank.config)
    rank.connection.send({"loaded": _describe(rank, loaded, reserved)})
    sizes: dict[str, Any] = rank.connection.receive()["sizes"]  # type: ignore[assignment]  # Set by the engine.
    loaded = _with_groups(loaded, sizes)
    sizing = KVSizing(
        sizes["num_kv_blocks"],
        rank.config.block_size,
        bytes_per_block(loaded.facts, rank.config.block_size),
        sizes["num_state_slots"],
    )
    runner = make_runner(
        rank.config,
        loaded,
        max_model_len=sizes["max_model_len"],
        sizing=sizing,
        proposer=proposer,
        parallel=parallel,
        samples=rank.position.is_last_stage,
        on_failed=None if rank.position.reports else partial(_send_failed_rows, rank),
        on_prepared=partial(_send_prepared, rank),
    )
    runner.warm_up(rank.config.max_num_batched_tokens)
    return _make_loop(rank, runner, sizes, on_gpu=loaded.device.type == "cuda")


def _choose_device(rank: _Rank) -> torch.device:
    requested = rank.config.device
    if requested == "cpu" or (requested == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    # The model is loaded onto the current device.
    torch.cuda.set_device(rank.position.rank)
    return torch.device("cuda", rank.position.rank)


def _progress(rank: _Rank) -> Callable[[str, int, int], None]:
    """Reports load progress: rank 0 for all ranks, at most once per interval."""
    reported_at = 0.0

    def report_progress(phase: str, done: int, total: int) -> None:
        nonlocal reported_at
        now = time.monotonic()
        if rank.position.rank == 0 and (done == total or now - reported_at >= _PROGRESS_INTERVAL_S):
            reported_at = now
            rank.connection.send({"progress": [phase, done, total]})

    return report_progress


def _describe(rank: _Rank, loaded: LoadedModel, reserved: int) -> dict[str, object]:
    free = free_memory(rank.config, loaded, reserved)
    return {
        "facts": asdict(loaded.facts),
        "num_bytes": loaded.model.num_bytes if isinstance(loaded.model, NativeDecoder) else 0,
        "free_bytes": free.num_bytes,
        "free_how": free.how,
        "device": loaded.device.type,
        "kernel_mode": kernel_mode(rank.config, loaded),
    }


def _with_groups(loaded: LoadedModel, sizes: Mapping[str, Any]) -> LoadedModel:
    """The model with the layer groups of all stages, of which this stage has some layers."""
    shapes = tuple(KVShape(**shape) for shape in sizes["kv_shapes"])
    first = sizes["first_layer"]
    groups = groups_of_stage(shapes, first, first + loaded.facts.num_layers)
    return replace(loaded, facts=replace(loaded.facts, stage_groups=groups))


def _make_loop(rank: _Rank, runner: ModelRunner, sizes: Mapping[str, Any], *, on_gpu: bool) -> RankLoop:
    extras = ExtraCodec(extra_types())
    decoder = PlanDecoder(max_num_seqs=sizes["max_num_seqs"], num_groups=sizes["num_groups"], extras=extras)
    return RankLoop(
        ChannelReader(reader_end(rank.spec["plans"]), spin_s=_SPIN_S if on_gpu else 0.0),
        decoder,
        runner,
        _part_of(rank, runner, on_gpu=on_gpu),
        calls=_calls(decoder, runner, sizes["num_groups"]),
        answer=lambda answer: rank.connection.send({"answer": answer}),
        has_dealt=lambda: rank.heartbeats.finish_step(rank.position.rank),
        preparer=runner.preparer,
        extras=extras,
    )


def _part_of(rank: _Rank, runner: ModelRunner, *, on_gpu: bool) -> AfterStep:
    if rank.position.reports:
        results, tokens = (
            ChannelWriter(writer_end(rank.spec[name])) for name in ("results_out", "tokens_out")
        )
        return Reporter(
            results,
            tokens if rank.position.pp_size > 1 else None,
            end_rank=partial(_end_rank, rank.connection) if on_gpu else None,
            extras=ExtraCodec(extra_types()),
        )
    if rank.position.is_last_stage:
        return Silent()
    return EarlyStage(ChannelReader(reader_end(rank.spec["tokens_in"])), runner.batch)


def _send_failed_rows(rank: _Rank, step_number: int, failed: Mapping[int, str]) -> None:
    rank.connection.send({"failed_rows": [step_number, list(failed.items())]})
    # After the message, which the engine then waits for.
    rank.heartbeats.count_failure(rank.position.rank)


def _send_prepared(rank: _Rank, number: int, failure: RequestFailed | None) -> None:
    # The engine may have ended meanwhile.
    with contextlib.suppress(EOFError):
        rank.connection.send(write_prepared(number, failure))


def _end_rank(connection: RankConnection, error: Exception) -> NoReturn:
    """End this process from another thread: the main thread is waiting for plans or for the device."""
    _send_failure(connection, error)
    os._exit(1)


def _calls(decoder: PlanDecoder, runner: ModelRunner, num_groups: int) -> dict[str, Call]:
    return {
        **runner_calls(runner),
        "digest": lambda arguments: {
            "batch": batch_digest(decoder, runner.batch, num_groups),
            "sampler": sampler_digest(runner.sampler),
        },
    }
