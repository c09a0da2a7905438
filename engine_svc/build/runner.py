"""Builds the device side from the configuration. Imports torch: import it late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine_svc.build.data_parallel import LockstepSide, build_experts, build_lockstep
from engine_svc.build.features import reserved_bytes, runner_features
from engine_svc.build.speculation import make_drafting, make_proposer
from engine_svc.config import EngineConfig
from engine_svc.data_parallel.expert_shards import HeldExperts
from engine_svc.loop.protocols import PreparingRanks
from engine_svc.loop.steps import Executor
from engine_svc.model.decoder import Model
from engine_svc.model.facts import ModelFacts
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.model.loading.packed_weights import PackedWeightsOptions
from engine_svc.model.loading.user_cache import user_cache
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.parallel import Parallel
from engine_svc.runner.control import RunnerControl, runner_calls
from engine_svc.runner.cuda_graphs import CudaRecorder, DecodeGraphs, decode_sizes
from engine_svc.runner.executor import InlineExecutor, ThreadExecutor
from engine_svc.runner.memory.free_memory import free_device_memory, free_host_memory, present_device_memory
from engine_svc.runner.memory.kv_sizing import (
    FreeMemory,
    KVCacheOptions,
    fit_max_model_len,
    size_kv_cache,
    size_states,
    warn_if_cut,
    without_states,
)
from engine_svc.runner.memory.kv_tensors import KVSizing, KVTensors
from engine_svc.runner.model_runner import ModelRunner, OnFailed, RunnerConfig
from engine_svc.runner.preparer import OnPrepared
from engine_svc.runner.sampler import LogprobsMode
from engine_svc.runner.sleep import WeightSource
from engine_svc.speculation.proposer import Proposer
from triptych_kernels import SUMS_VERSION
from triptych_kit.config import ConfigError

Progress = Callable[[str, int, int], None]

GPU_IS_FULL = (
    "the GPU has too little memory for this model: lower --gpu-memory-utilization or "
    "--max-num-batched-tokens, quantize, or divide the model over more GPUs"
)


@dataclass(frozen=True, slots=True)
class RunnerSide:
    """The side that runs plans, as the engine needs it. Blocks are counted without the placeholder."""

    executor: Executor
    control: RunnerControl
    preparing: PreparingRanks
    model: ModelFacts
    max_model_len: int
    num_kv_blocks: int
    num_state_slots: int
    steps_in_flight: int
    kernel_mode: str
    lockstep: LockstepSide | None = None  # if this engine holds a shard of the experts
    rank_ids: tuple[int, ...] = ()  # process ids of the ranks, if there are any


def build_runner(
    config: EngineConfig, progress: Progress, on_prepared: OnPrepared = lambda number, failure: None
) -> RunnerSide:
    """Load the model, size its cache, start its executor. Raises ValueError with a message for operators."""
    experts, options = build_experts(config), load_options(config)
    try:
        loaded = load_model(
            config.model,
            options,
            share=None if experts is None else experts.share,
            progress=progress,
        )
        if experts is not None:
            experts.attach(loaded, Checkpoint(Path(config.model)))
        progress("memory", 0, 1)
        proposer = make_proposer(config, loaded, options)
        free = free_memory(config, loaded, reserved=proposer.num_bytes + reserved_bytes(config))
        max_model_len, sizing = size_cache(config, loaded.facts, free)
        if config.num_kv_blocks is None and config.kv_cache_memory is not None:
            warn_if_cut(config.kv_cache_memory, [sizing])
        progress("warm-up", 0, 1)
        runner = make_runner(
            config,
            loaded,
            max_model_len=max_model_len,
            sizing=sizing,
            proposer=proposer,
            experts=experts,
            on_prepared=on_prepared,
        )
        runner.warm_up(config.max_num_batched_tokens)
        progress("warm-up", 1, 1)
    except torch.OutOfMemoryError as error:
        raise ConfigError(GPU_IS_FULL) from error
    calls = runner_calls(runner)
    # A GPU runs asynchronously. On a CPU that needs a thread, if steps are to overlap with scheduling.
    is_beside = loaded.device.type == "cpu" and config.steps_in_flight > 1
    executor = ThreadExecutor(runner, calls) if is_beside else InlineExecutor(runner, calls)
    return RunnerSide(
        executor=executor,
        control=RunnerControl(executor),
        preparing=runner.preparer,
        model=loaded.facts,
        max_model_len=max_model_len,
        num_kv_blocks=sizing.num_blocks,
        num_state_slots=sizing.num_state_slots,
        steps_in_flight=config.steps_in_flight,
        # The number of engines that share the experts is left out, although sums over them differ in their
        # last bits: a request may continue on another engine of a group that has shrunk.
        kernel_mode=kernel_mode(config, loaded) + ("" if experts is None else "-ep"),
        lockstep=None if experts is None else build_lockstep(config, experts, loaded.device),
    )


def load_options(config: EngineConfig) -> LoadOptions:
    return LoadOptions(
        dtype=config.dtype,
        device=config.device,
        model_impl=config.model_impl,
        quantization="" if config.quantization == "none" else config.quantization,
        num_threads=config.num_threads,
        is_deterministic=None if config.deterministic == "auto" else config.deterministic == "on",
        cpu_isa=config.cpu_isa,
        activations=config.activations,
        pooling=config.pooling,
        packed_weights=_packed_weights(config),
    )


def _packed_weights(config: EngineConfig) -> PackedWeightsOptions | None:
    given = config.packed_weights_cache
    cache = user_cache() if given == "auto" else None
    if given == "off" or (given == "auto" and cache is None):
        return None
    folder = Path(given) if cache is None else cache / "weights"
    return PackedWeightsOptions(folder, config.packed_weights_cache_size)


def kernel_mode(config: EngineConfig, loaded: LoadedModel) -> str:
    """Identifies everything that affects reported logprobs; engines that differ in it are not equal."""
    mode = LogprobsMode(config.logprobs_mode)
    suffix = () if mode is LogprobsMode.RAW_LOGPROBS else (mode.value,)
    rounding = () if loaded.activations in ("", "exact") else (f"{loaded.activations}-activations",)
    kernels = f"{loaded.ops.name}-{SUMS_VERSION}"
    return "-".join((loaded.implementation, kernels, config.quantization, *rounding, *suffix))


def make_runner(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    max_model_len: int,
    sizing: KVSizing,
    proposer: Proposer,
    parallel: Parallel | None = None,
    experts: HeldExperts | None = None,
    samples: bool = True,
    on_failed: OnFailed | None = None,
    on_prepared: OnPrepared = lambda number, failure: None,
) -> ModelRunner:
    """The runner of this rank, with its cache. sizing: without the placeholder block.

    samples: False for an early stage of a pipeline.
    """
    sizing = replace(sizing, num_blocks=sizing.num_blocks + 1)
    facts, ops = loaded.facts, loaded.ops
    # A configured cache size is allocated at once.
    is_stated = config.kv_cache_memory is not None and config.num_kv_blocks is None
    kv = KVTensors(facts, sizing, loaded.device, at_once=is_stated)

    # Neither function refers to `loaded`: it would keep the weights alive while the engine sleeps.
    def load(checkpoint: Checkpoint) -> tuple[Model, ModelFacts]:
        share = None if experts is None else experts.share
        options = load_options(config)
        if (kept := options.packed_weights) is not None:
            # In training, weights are replaced by others soon.
            options = replace(options, packed_weights=replace(kept, is_written=False))
        again = load_model(checkpoint, options, parallel=parallel, share=share, ops=ops)
        if experts is not None:
            experts.attach(again, checkpoint)
        proposer.attach(again.model, checkpoint)
        return again.model, again.facts

    def record(model: Model) -> DecodeGraphs | None:
        # Communication between engines cannot be recorded in a CUDA graph.
        if experts is not None:
            return None
        return _graphs(config, model, facts, kv, max_model_len)

    return ModelRunner(
        loaded.model,
        facts,
        kv,
        RunnerConfig(
            config.max_num_seqs, max_model_len, config.block_size, LogprobsMode(config.logprobs_mode)
        ),
        ops,
        make_features=partial(runner_features, config, samples=samples),
        make_drafting=make_drafting(config, proposer),
        graphs=record(loaded.model),
        source=WeightSource(Checkpoint(Path(config.model)), load, record, proposer.detach),
        exchange=None if experts is None else experts.exchange,
        is_last_stage=samples,
        on_failed=on_failed,
        on_prepared=on_prepared,
    )


@torch.inference_mode()
def _graphs(
    config: EngineConfig, model: Model, facts: ModelFacts, kv: KVTensors, max_model_len: int
) -> DecodeGraphs | None:
    # Models of transformers may synchronize with the device inside a forward, which cannot be recorded.
    is_recorded = isinstance(model, NativeDecoder) and model.is_recordable
    if kv.device.type != "cuda" or not config.cuda_graphs or not is_recorded:
        return None
    return DecodeGraphs(
        model,
        kv.layers,
        sizes=decode_sizes(config.max_num_seqs),
        num_groups=len(facts.groups),
        vocab_size=facts.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        device=kv.device,
        record=CudaRecorder(),
        state_layers=kv.states.layers,
    )


def size_cache(config: EngineConfig, facts: ModelFacts, free: FreeMemory) -> tuple[int, KVSizing]:
    """Maximum model length and cache size. A length that is not configured is reduced to what fits."""
    if config.max_model_len is not None and config.max_model_len > facts.max_position:
        raise ConfigError(f"--max-model-len is {config.max_model_len}, the model takes {facts.max_position}")
    kv_options = KVCacheOptions(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens * config.steps_in_flight,
        kv_cache_memory=config.kv_cache_memory,
        num_kv_blocks=config.num_kv_blocks,
        state_cache_memory=config.state_cache_memory,
        keeps_states=config.enable_prefix_caching,
    )
    num_slots = size_states(facts, kv_options, free)
    free = without_states(facts, free, num_slots)
    max_model_len = config.max_model_len or fit_max_model_len(facts, kv_options, free)
    sizing = size_kv_cache(facts, kv_options, max_model_len=max_model_len, free=free)
    return max_model_len, replace(sizing, num_state_slots=num_slots)


def free_memory(config: EngineConfig, loaded: LoadedModel, reserved: int = 0) -> FreeMemory:
    """Memory of this rank's device for the KV cache; on a GPU measured only if no size is configured.

    reserved: bytes that others will use; on a GPU they are allocated already.
    """
    if loaded.device.type == "cpu":
        free = free_host_memory()
        reserved += loaded.shared_bytes
        less = f", less {reserved >> 20} MiB for shared weights, drafts and adapters," if reserved else ""
        return FreeMemory(max(0, free.num_bytes - reserved), free.how + less)
    if config.num_kv_blocks is not None or config.kv_cache_memory is not None:
        return present_device_memory()
    return free_device_memory(
        loaded.model,
        loaded.facts,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len or loaded.facts.max_position,
        utilization=config.gpu_memory_utilization,
    )
