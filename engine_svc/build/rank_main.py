"""The process of one rank: loads its part of the model and runs plans until the engine has no more of them.

Knows no requests and no wire.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch

from engine_svc.build.runner import (
    GPU_IS_FULL,
    free_memory,
    kernel_mode,
    load_wishes,
    make_runner,
)
from engine_svc.config import EngineConfig
from engine_svc.model.facts import KVShape, groups_of_stage
from engine_svc.model.loading.loader import LoadedModel, load_model
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.process_parallel import Place, ProcessParallel
from engine_svc.ranks.control_pipe import RankLine, end_with_parent
from engine_svc.ranks.loop import AfterStep, EarlyStage, RankLoop, Reporter, Silent
from engine_svc.ranks.plan_channel import ChannelReader, ChannelWriter, reader_end, writer_end
from engine_svc.ranks.plan_codec import PlanDecoder
from engine_svc.ranks.progress_board import ProgressBoard, start_heart
from engine_svc.ranks.state_digest import batch_digest, sampler_digest
from engine_svc.runner.control import runner_calls
from engine_svc.runner.executor import Call
from engine_svc.runner.memory.kv_tensors import KVSizing, bytes_per_block
from engine_svc.runner.model_runner import ModelRunner
from service_kit.logs import setup_logs
from service_kit.plugins import load_plugins
from service_kit.process import set_title
from service_kit.stacks import write_when_asked

# A GPU's rank looks for its next plan for a while before it sleeps: waking up takes longer than that.
_SPIN_S = 50e-6
_PROGRESS_INTERVAL_S = 0.1
# As good as for ever: the engine judges how long a step may take, and leaves out the time in which all were
# stopped, as the clocks of gloo and NCCL do not.
_EXCHANGE_S = 7 * 86_400.0


def main(argv: Sequence[str]) -> int:
    """Run a rank. The only argument is the descriptor of its line, on which everything else is said."""
    line = RankLine(int(argv[0]))
    spec: dict[str, Any] = line.hear()
    end_with_parent(spec["parent"])
    write_when_asked()
    config = EngineConfig(**spec["config"])
    place = Place(spec["rank"], spec["tp_size"], spec["pp_size"], spec["divides_experts"])
    set_title("engine", config.index, "rank", place.rank)
    setup_logs(
        "engine",
        instance=f"{config.index}/rank-{place.rank}",
        log_format=config.log_format,
        log_level=config.log_level,
    )
    board = ProgressBoard(spec["board_fd"], place.num_ranks)
    start_heart(board, place.rank, spec["heart_interval_s"])
    try:
        load_plugins(config.plugins)
        _serve(_Rank(config, place, spec, line, board))
    except EOFError:
        # The engine ended before this rank was ready, and has its reasons.
        return 0
    except Exception as error:
        _say_failed(line, error)
        raise
    return 0


def _say_failed(line: RankLine, error: Exception) -> None:
    with contextlib.suppress(EOFError):
        line.say({"failed": f"raised {type(error).__name__}", "details": str(error)})


@dataclass(frozen=True, slots=True)
class _Rank:
    """What this process is and whom it talks to."""

    config: EngineConfig
    place: Place
    spec: dict[str, Any]
    line: RankLine
    board: ProgressBoard


def _serve(rank: _Rank) -> None:
    device = _choose_device(rank)
    parallel = ProcessParallel(
        rank.place,
        store_path=f"/proc/self/fd/{rank.spec['store_fd']}",
        device=device,
        timeout_s=_EXCHANGE_S,
    )
    loop = _prepare(rank, parallel)
    rank.line.say({"ready": {}})
    rank.line.end_with_it()
    loop.run()
    parallel.close()


def _prepare(rank: _Rank, parallel: ProcessParallel) -> RankLoop:
    """Get ready, or say why that cannot be where people can mend it."""
    try:
        return _load(rank, parallel)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        is_full = isinstance(error, torch.OutOfMemoryError)
        rank.line.say({"refused": GPU_IS_FULL if is_full else str(error)})
        # The engine ends this process.
        rank.line.hear()
        raise


def _load(rank: _Rank, parallel: ProcessParallel) -> RankLoop:
    """Load, say what there is, and make of it what the engine answers. Keeps no part of the model itself."""
    loaded = load_model(
        rank.config.model, load_wishes(rank.config), parallel=parallel, progress=_progress(rank)
    )
    rank.line.say({"loaded": _describe(rank, loaded)})
    sizes: dict[str, Any] = rank.line.hear()["sizes"]  # type: ignore[assignment]  # The engine says it so.
    loaded = _with_groups(loaded, sizes)
    sizing = KVSizing(
        sizes["num_kv_blocks"], rank.config.block_size, bytes_per_block(loaded.facts, rank.config.block_size)
    )
    runner = make_runner(
        rank.config, loaded, max_model_len=sizes["max_model_len"], sizing=sizing, parallel=parallel
    )
    runner.warm_up(rank.config.max_num_batched_tokens)
    return _make_loop(rank, runner, sizes, on_gpu=loaded.device.type == "cuda")


def _choose_device(rank: _Rank) -> torch.device:
    wish = rank.config.device
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    # The model is put on what is the current device from here on.
    torch.cuda.set_device(rank.place.rank)
    return torch.device("cuda", rank.place.rank)


def _progress(rank: _Rank) -> Callable[[str, int, int], None]:
    """Tells how far loading is: one rank for all of them, and not for every tensor."""
    told_at = 0.0

    def tell(phase: str, done: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if rank.place.rank == 0 and (done == total or now - told_at >= _PROGRESS_INTERVAL_S):
            told_at = now
            rank.line.say({"progress": [phase, done, total]})

    return tell


def _describe(rank: _Rank, loaded: LoadedModel) -> dict[str, object]:
    free = free_memory(rank.config, loaded)
    return {
        "facts": asdict(loaded.facts),
        "num_bytes": loaded.model.num_bytes if isinstance(loaded.model, NativeDecoder) else 0,
        "free_bytes": free.num_bytes,
        "free_how": free.how,
        "device": loaded.device.type,
        "kernel_mode": kernel_mode(rank.config, loaded),
    }


def _with_groups(loaded: LoadedModel, sizes: Mapping[str, Any]) -> LoadedModel:
    """With block tables for the layer groups of the whole model, of which a stage has some layers."""
    shapes = tuple(KVShape(**shape) for shape in sizes["kv_shapes"])
    first = sizes["first_layer"]
    groups = groups_of_stage(shapes, first, first + loaded.facts.num_layers)
    return replace(loaded, facts=replace(loaded.facts, stage_groups=groups))


def _make_loop(rank: _Rank, runner: ModelRunner, sizes: Mapping[str, Any], *, on_gpu: bool) -> RankLoop:
    decoder = PlanDecoder(max_num_seqs=sizes["max_num_seqs"], num_groups=sizes["num_groups"])
    return RankLoop(
        ChannelReader(reader_end(rank.spec["plans"]), spin_s=_SPIN_S if on_gpu else 0.0),
        decoder,
        runner,
        _part_of(rank, runner, on_gpu=on_gpu),
        calls=_calls(decoder, runner, sizes["num_groups"]),
        answer=lambda answer: rank.line.say({"answer": answer}),
        has_dealt=lambda: rank.board.finish_step(rank.place.rank),
    )


def _part_of(rank: _Rank, runner: ModelRunner, *, on_gpu: bool) -> AfterStep:
    if rank.place.reports:
        results, tokens = (
            ChannelWriter(writer_end(rank.spec[name])) for name in ("results_out", "tokens_out")
        )
        return Reporter(
            results,
            tokens if rank.place.pp_size > 1 else None,
            end_rank=partial(_end_rank, rank.line) if on_gpu else None,
        )
    if rank.place.is_last_stage:
        return Silent()
    return EarlyStage(ChannelReader(reader_end(rank.spec["tokens_in"])), runner.batch)


def _end_rank(line: RankLine, error: Exception) -> NoReturn:
    """End this process from a thread: the main thread waits for plans, or for the device."""
    _say_failed(line, error)
    os._exit(1)


def _calls(decoder: PlanDecoder, runner: ModelRunner, num_groups: int) -> dict[str, Call]:
    return {
        **runner_calls(runner),
        "digest": lambda arguments: {
            "batch": batch_digest(decoder, runner.batch, num_groups),
            "sampler": sampler_digest(runner.sampler),
        },
    }
