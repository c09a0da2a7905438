"""Builds the engine from its configuration. Imported by `process.run` alone."""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from engine_svc.admin import announce
from engine_svc.admin.calls import AdminCalls
from engine_svc.admin.lifecycle import Lifecycle
from engine_svc.admin.metrics import register_engine
from engine_svc.admin.served_engine import LoadedCore, OptionInEffect, ServedEngine
from engine_svc.admin.utility import ENGINE_CALLS, registered
from engine_svc.build.features import collectives, scheduler_features, wire_features
from engine_svc.build.fingerprint import (
    declares_experts,
    main_eos_first,
    make_fingerprint,
    read_sampling_defaults,
)
from engine_svc.build.start_check import POLICY_ENTRY_POINTS, SCHEDULER_ENTRY_POINTS
from engine_svc.cache.attention import (
    AlignedState,
    AttentionKind,
    ChunkedLocal,
    FullAttention,
    KeptState,
    SlidingWindow,
)
from engine_svc.cache.config import CacheConfig
from engine_svc.cache.kv_cache import KVCache
from engine_svc.config import EngineConfig
from engine_svc.core.artifacts import Artifact, check_artifacts, read_artifacts
from engine_svc.core.errors import RequestFailed
from engine_svc.core.facts import EngineFacts, EngineIdentity, LoadProgress, ModelFingerprint
from engine_svc.core.pooling_spec import describe_results
from engine_svc.loop.engine import Engine
from engine_svc.loop.mailbox import Fail, Inbox, KVEventLog, Prepared, StatsSnapshot
from engine_svc.loop.preparation import Preparations
from engine_svc.loop.protocols import EngineScheduler, NoLockstep
from engine_svc.loop.requests import IdleLimits
from engine_svc.membership.departure import Departure
from engine_svc.membership.membership import Membership
from engine_svc.model.facts import LayerGroup
from engine_svc.model.loading.gguf.folder import is_from_file
from engine_svc.scheduler.budget import Budget, ChunkEnds
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.feature import SchedulerContext, SchedulerFeature
from engine_svc.scheduler.policies import POLICIES
from engine_svc.scheduler.policy import Policy, PolicyFactory
from engine_svc.scheduler.scheduler import Scheduler
from engine_svc.scheduler.watch import SchedulerWatch
from engine_svc.session.servicer import FULL_NAME, EngineCoreServicer
from engine_svc.tensors.source import TensorReceiver
from triptych_kit.addresses import (
    is_wildcard,
    join_address,
    listen_at,
    loopback_of,
    split_address,
    unix_path,
)
from triptych_kit.admin import AdminServicer
from triptych_kit.clock import MonotonicClock
from triptych_kit.config import ConfigError
from triptych_kit.http.admin_http import AdminHTTP
from triptych_kit.http.pages import metrics_page
from triptych_kit.http.trace_page import traces_page
from triptych_kit.plugins import find_offered
from triptych_kit.process.setup import importing
from triptych_kit.security.setup import listener_security, peer_credentials
from triptych_kit.server import ADMIN, INTERNAL, Registration, Server
from triptych_kit.server import Lifecycle as ServiceLifecycle
from triptych_kit.telemetry.metrics import Metrics
from triptych_kit.version import installed_version

if TYPE_CHECKING:
    from engine_svc.build.runner import RunnerSide
    from engine_svc.data_parallel.driver import LockstepDriver
    from engine_svc.loop.controls import EngineControls

logger = logging.getLogger(__name__)

_MAX_COMMANDS = 16_384
# How far a subscriber may be behind: about as much memory as a frontend's outbox.
_MAX_KV_BATCHES = 4096
_MAX_KV_BATCH_BLOCKS = 32_768

# What an entry point of the group `triptych.schedulers` refers to: a subclass of `Scheduler`, or what has its
# arguments and members.
SchedulerFactory = Callable[
    [SchedulerConfig, KVCache, Policy, Sequence[SchedulerFeature], Sequence[Budget]], Scheduler
]
_SCHEDULERS: dict[str, SchedulerFactory] = {"default": Scheduler}


def build_served_engine(
    config: EngineConfig,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> ServedEngine:
    """The engine before its model is loaded. Raises ConfigError.

    origins: origin of each option's value; an option that is missing was set in code.
    """
    _find_policy(config.scheduling_policy)
    _find_scheduler(config.scheduler_class)
    identity = EngineIdentity(
        # Stable if the port is fixed: the next process on it then replaces this one at the coordinator.
        engine_id=f"{socket.gethostname()}:{config.port or f'pid-{os.getpid()}'}",
        # Never 0, which means "none" on the wire.
        engine_epoch=secrets.randbits(63) + 1,
        version=installed_version(),
        dp_rank=config.data_parallel_rank,
        dp_size=config.data_parallel_size,
        dp_group=config.data_parallel_group,
        labels=tuple(config.labels.items()),
    )
    features = wire_features(config)
    return ServedEngine(
        identity=identity,
        artifacts=read_artifacts(Path(config.model)),
        lifecycle=Lifecycle(),
        inbox=Inbox(_MAX_COMMANDS),
        stats_snapshot=StatsSnapshot(),
        clock=MonotonicClock(),
        drain_deadline_s=config.drain_deadline_s,
        replay_window_s=config.replay_window_s,
        kv_event_log=KVEventLog(max_batches=_MAX_KV_BATCHES, max_blocks=_MAX_KV_BATCH_BLOCKS)
        if config.enable_kv_events
        else None,
        metrics=Metrics(
            "engine",
            {"model_name": _served_name(config), "engine": str(config.data_parallel_rank)},
        ),
        features=features,
        tensors=TensorReceiver(is_open=features.take_tensors),
        options=_options(config, origins),
        utilities=registered([*ENGINE_CALLS, *features.utilities]),
        shares_experts=config.divides_experts and declares_experts(Path(config.model)),
    )


def build_servers(
    config: EngineConfig, engine: ServedEngine, servicer: EngineCoreServicer, lifecycle: ServiceLifecycle
) -> tuple[Server, Server, AdminHTTP]:
    """The listener for frontends, then the admin listeners. Raises ConfigError for unusable certificates."""
    security = listener_security(config)
    register_engine(engine.metrics, engine, servicer)
    security.register(engine.metrics, "engine")
    admin = AdminServicer(
        "engine",
        f"engine-{config.index}",
        lambda: announce.status(engine, servicer.num_sessions),
        lifecycle=lifecycle,
        utility=AdminCalls(engine).serve,
        watch=servicer.watchers.responses,
    )
    return (
        Server(
            listen=listen_at(config.uds, config.host, config.port),
            registrations=[Registration(FULL_NAME, servicer.add_to)],
            profile=INTERNAL,
            service="engine",
            reflection=config.reflection,
            security=security,
        ),
        Server(
            listen=listen_at(config.admin_uds, loopback_of(config.host), config.admin_port),
            registrations=[admin.registration()],
            profile=ADMIN,
            service="engine",
            reflection=config.reflection,
            security=security,
        ),
        AdminHTTP(
            listen_at(config.admin_http_uds, config.admin_http_host, config.admin_http_port),
            {"/metrics": metrics_page(engine.metrics.collect), "/traces/last": traces_page},
            security=security,
        ),
    )


def build_memberships(
    config: EngineConfig,
    engine: ServedEngine,
    departure: Departure,
    *,
    bound: str,
) -> list[Membership]:
    """The membership at the coordinator, if one is configured."""
    if config.coordinator is None:
        return []
    endpoint = _endpoint(config, bound)
    return [
        Membership(
            engine,
            coordinator=config.coordinator,
            credentials=peer_credentials(config),
            endpoint=endpoint,
            departure=departure,
        )
    ]


def build_engine(
    config: EngineConfig,
    served: ServedEngine,
    *,
    progress: Callable[[LoadProgress], None],
    defer: Callable[[Callable[[], None]], object],
) -> tuple[Engine, LoadedCore]:
    """Load the model and assemble the engine. Raises ValueError with a message for the operator."""
    # Imported here: these import torch, and the process should answer before that is done.
    with importing():
        from engine_svc.build.runner import build_runner

    if not is_from_file(Path(config.model)):
        check_artifacts(served.artifacts)

    def on_prepared(number: int, failure: RequestFailed | None) -> None:
        served.inbox.put(Prepared(number, failure))

    def report_progress(phase: str, done: int, total: int) -> None:
        progress(LoadProgress(phase, done, total))

    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        from engine_svc.build.ranks import build_ranks

        # An idle engine loop waits for nothing but its inbox.
        side = build_ranks(
            config,
            report_progress,
            on_lost=lambda lost: served.inbox.put(Fail(lost)),
            on_prepared=on_prepared,
        ).side
    else:
        side = build_runner(config, report_progress, on_prepared)
    try:
        return _put_together(config, served, side, defer)
    except BaseException:
        # Otherwise ranks and threads would remain if the engine is embedded in another process.
        side.executor.shutdown()
        raise


def _put_together(
    config: EngineConfig,
    served: ServedEngine,
    side: RunnerSide,
    defer: Callable[[Callable[[], None]], object],
) -> tuple[Engine, LoadedCore]:
    # Imported here, as what builds the side.
    from engine_svc.runner.memory.free_memory import num_bytes_in_use

    facts = _describe(config, served.artifacts, side)
    scheduler_config = _scheduler_config(config, side)
    cache_config = CacheConfig(
        # The cache reserves one block as a placeholder.
        num_blocks=side.num_kv_blocks + 1,
        groups=layer_kinds(config, side.model.groups, side.num_state_slots),
        enable_prefix_caching=config.enable_prefix_caching,
        num_state_slots=side.num_state_slots,
        fingerprint=bytes.fromhex(facts.fingerprint.digest),
    )
    kv_event_log = served.kv_event_log
    context = SchedulerContext(
        served.clock,
        defer,
        scheduler_config,
        cache_config,
        served.metrics,
        None if kv_event_log is None else kv_event_log.publish,
    )
    watch = SchedulerWatch(served.clock)
    features = [*scheduler_features(config, context), watch]
    preparations = Preparations(side.preparing, served.clock, features)
    features.append(preparations)
    core = build_core(
        scheduler_config,
        cache_config,
        policy=config.scheduling_policy,
        scheduler_class=config.scheduler_class,
        features=features,
    )
    scheduler: EngineScheduler = core.scheduler
    for feature in features:
        scheduler = feature.wrap(scheduler, core.kv_cache)
    at_end: list[Callable[[], None]] = [feature.close for feature in features]
    lockstep = _build_lockstep(config, served, side, facts, at_end)
    engine = Engine(
        scheduler=scheduler,
        executor=side.executor,
        inbox=served.inbox,
        stats_snapshot=served.stats_snapshot,
        clock=served.clock,
        lockstep=lockstep or NoLockstep(),
        preparations=preparations,
        max_in_flight=side.steps_in_flight,
        at_end=at_end,
        step_limit_s=config.step_limit_s,
        idle_limits=IdleLimits(config.session_idle_s, config.max_idle_sessions),
    )
    controls = _build_controls(config, served, side, facts, engine, scheduler, defer, lockstep)
    return engine, LoadedCore(
        facts,
        core.scheduler.refusal,
        core.kv_cache.prepare,
        controls,
        lockstep,
        side.rank_ids,
        num_bytes_in_use,
        watch,
    )


def _build_lockstep(
    config: EngineConfig,
    served: ServedEngine,
    side: RunnerSide,
    facts: EngineFacts,
    at_end: list[Callable[[], None]],
) -> LockstepDriver | None:
    """The lockstep with the engines that hold the other experts of the model; None: this engine has all."""
    if served.shares_experts != (side.lockstep is not None):
        raise ConfigError(
            "--expert-parallel over several engines is for mixtures of experts with a native implementation"
        )
    if side.lockstep is None:
        return None
    from engine_svc.build.data_parallel import build_driver

    return build_driver(
        config,
        served,
        side.lockstep,
        facts.fingerprint,
        weights_digest=side.model.weights_digest,
        at_end=at_end,
    )


def _build_controls(
    config: EngineConfig,
    served: ServedEngine,
    side: RunnerSide,
    facts: EngineFacts,
    engine: Engine,
    scheduler: EngineScheduler,
    defer: Callable[[Callable[[], None]], object],
    lockstep: LockstepDriver | None,
) -> EngineControls:
    from engine_svc.loop.controls import EngineControls
    from engine_svc.runner.control import COLLECTIVES

    def on_weights(folder: Path, digest: str) -> None:
        # Noted first: the new weights are in use even if reading their folder fails below.
        if lockstep is not None:
            lockstep.note_weights(digest)
        fingerprint = _fingerprint(config, folder, served.artifacts, side, digest)
        defer(lambda: served.renew(replace(facts, fingerprint=fingerprint)))

    return EngineControls(
        loop=engine,
        scheduler=scheduler,
        lockstep=lockstep or NoLockstep(),
        ranks=side.control,
        clock=served.clock,
        weights_folder=Path(config.model),
        profile_dir=None if config.profile_dir is None else Path(config.profile_dir),
        profile_prefix=f"engine-{config.index}",
        collectives=(*COLLECTIVES, *collectives(config)),
        on_weights=on_weights,
    )


@dataclass(frozen=True, slots=True)
class Core:
    """The scheduling side of an engine, which needs no model, device or wire."""

    scheduler: Scheduler
    kv_cache: KVCache


def build_core(
    scheduler: SchedulerConfig,
    cache: CacheConfig,
    *,
    policy: str = "fcfs",
    scheduler_class: str = "default",
    features: Sequence[SchedulerFeature] = (),
    budgets: Sequence[Budget] = (),
) -> Core:
    """The scheduler and its cache. Raises ConfigError or ValueError with a message for the operator."""
    _check_states(scheduler, cache)
    kv_cache = KVCache(
        cache,
        max_model_len=scheduler.max_model_len,
        max_in_flight_tokens=scheduler.max_num_batched_tokens * scheduler.max_steps_in_flight,
        observers=[feature.cache_observer for feature in features if feature.cache_observer is not None],
    )
    # First, as another budget that ends a chunk earlier must not leave nothing of it.
    budgets = [*_chunk_ends(scheduler, cache), *budgets]
    make_scheduler = _find_scheduler(scheduler_class)
    return Core(
        make_scheduler(scheduler, kv_cache, _find_policy(policy)(scheduler), features, budgets), kv_cache
    )


def _check_states(scheduler: SchedulerConfig, cache: CacheConfig) -> None:
    """Raise ValueError for options that do not go with states of layers."""
    if not any(isinstance(kind, KeptState) for kind in cache.groups):
        return
    if scheduler.num_speculative_tokens:
        raise ValueError("drafts are not served for a model whose layers have states")
    # A request that hits a state reads its slot and writes another.
    num_needed = scheduler.max_num_seqs + 1
    if cache.num_state_slots < num_needed:
        raise ValueError(
            f"memory for states holds {cache.num_state_slots}, max_num_seqs of {scheduler.max_num_seqs} "
            f"needs {num_needed}"
        )


def _chunk_ends(scheduler: SchedulerConfig, cache: CacheConfig) -> list[Budget]:
    """What ends chunks of prompts where a group writes a state, if it writes none in the middle of a step."""
    sizes = {kind.block_size for kind in cache.groups if isinstance(kind, AlignedState)}
    if sizes and not scheduler.enable_chunked_prefill:
        raise ValueError("a layer writes its state at the end of a step: prompts must be computed in chunks")
    return [ChunkEnds(math.lcm(*sizes), scheduler.max_num_batched_tokens)] if sizes else []


def layer_kinds(
    config: EngineConfig, groups: Sequence[LayerGroup], num_state_slots: int
) -> tuple[AttentionKind, ...]:
    """The groups of layers in the order of plans: those with attention, then the layers with states."""
    size = config.block_size
    attention = tuple(attention_kind(group, size) for group in groups)
    interval = -(-config.state_interval // size) * size
    return (*attention, KeptState(size, interval)) if num_state_slots else attention


def attention_kind(group: LayerGroup, block_size: int) -> AttentionKind:
    """What the cache has to know of layers with attention."""
    if group.chunk is not None:
        return ChunkedLocal(block_size, group.chunk)
    return FullAttention(block_size) if group.window is None else SlidingWindow(block_size, group.window)


def _describe(config: EngineConfig, artifacts: tuple[Artifact, ...], side: RunnerSide) -> EngineFacts:
    folder, model = Path(config.model), side.model
    return EngineFacts(
        model_name=_served_name(config),
        fingerprint=_fingerprint(config, folder, artifacts, side, model.weights_digest),
        max_model_len=side.max_model_len,
        block_size=config.block_size,
        num_kv_blocks=side.num_kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=model.vocab_size,
        eos_token_ids=main_eos_first(folder, model.eos_token_ids),
        default_sampling=read_sampling_defaults(folder),
        supported_tasks=model.tasks,
        max_logprobs=config.max_logprobs,
        hidden_size=model.hidden_size,
        state_size=model.state_size,
        expert_choices=model.expert_choices,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        model_folder=str(folder.resolve()),
    )


def _served_name(config: EngineConfig) -> str:
    return config.served_model_name or Path(config.model).resolve().name


def _fingerprint(
    config: EngineConfig,
    folder: Path,
    artifacts: tuple[Artifact, ...],
    side: RunnerSide,
    weights_digest: str,
) -> ModelFingerprint:
    return make_fingerprint(
        folder,
        artifacts,
        weights_digest=weights_digest,
        dtype=side.model.dtype,
        vocab_size=side.model.vocab_size,
        kernel_mode=side.kernel_mode,
        max_model_len=side.max_model_len,
        results=describe_results(folder, config.pooling),
    )


def _options(config: EngineConfig, origins: Mapping[str, str]) -> tuple[OptionInEffect, ...]:
    return tuple(
        OptionInEffect(name, "" if value is None else str(value), origins.get(name, "code"))
        for name, value in sorted(asdict(config).items())
    )


def _scheduler_config(config: EngineConfig, side: RunnerSide) -> SchedulerConfig:
    method, num_drafts, _ = config.speculation
    step_costs = None
    if method != "off" and config.draft_limit == "gain":
        # Imported here, as `build_runner` is.
        from engine_svc.build.speculation import measure_step_costs

        step_costs = measure_step_costs(config, side.control)
    has_kv = bool(side.model.groups or side.num_state_slots)
    if config.enable_chunked_prefill and not has_kv:
        logger.warning(
            "chunked prefill is off: the model keeps no KV, so each prompt is computed in one step"
        )
    return SchedulerConfig(
        max_model_len=side.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        enable_chunked_prefill=config.enable_chunked_prefill and has_kv,
        enable_common_prefix=config.enable_common_prefix and side.model.reads_common_blocks,
        long_prefill_token_threshold=config.long_prefill_token_threshold if has_kv else 0,
        prefill_share=config.prefill_share,
        holds_idle=config.idle_sessions == "hold",
        async_scheduling=side.steps_in_flight > 1,
        max_steps_in_flight=side.steps_in_flight,
        num_speculative_tokens=num_drafts if method != "off" else 0,
        drafts_at_launch=method != "off",
        step_costs=step_costs,
    )


def _find_policy(name: str) -> PolicyFactory:
    return find_offered(name, POLICIES, group=POLICY_ENTRY_POINTS, option="--scheduling-policy")


def _find_scheduler(name: str) -> SchedulerFactory:
    return find_offered(name, _SCHEDULERS, group=SCHEDULER_ENTRY_POINTS, option="--scheduler-class")


def _endpoint(config: EngineConfig, bound: str) -> str:
    """The address at which frontends reach this engine: with the bound port, never a wildcard host."""
    if unix_path(bound) is not None:
        return bound
    host, port = split_address(bound)
    if config.advertise_address is not None:
        try:
            split_address(config.advertise_address)
        except ValueError:  # a host alone
            return join_address(config.advertise_address, port)
        return config.advertise_address
    return join_address(socket.gethostname(), port) if is_wildcard(host) else bound
