"""Stand-ins for an engine's neighbours: a model whose tokens are hashes, and a coordinator."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_svc.build.engine import build_core
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.core.step import StepPlan, StepResult
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.feature import SchedulerFeature
from engine_svc.scheduler.scheduler import Scheduler
from triptych.coordinator.v1 import command_pb2, coordinator_pb2, coordinator_pb2_grpc, member_pb2
from triptych_kit.errors import ServiceError, Unavailable

VOCAB_SIZE = 1000
EOS_TOKEN_ID = 990  # the fake model never says it: its tokens are below
MAX_MODEL_LEN = 128
# Longer than anything takes here, however busy the machine: a test that runs into it has failed.
LIMIT_S = 60.0


def expected_token(prompt: list[int], seed: int, position: int) -> int:
    """The token the fake model puts at `position` of the sequence that begins with `prompt`."""
    return zlib.crc32(repr((prompt, seed, position)).encode()) % EOS_TOKEN_ID


def expected_tokens(prompt: list[int], seed: int, num_tokens: int) -> list[int]:
    """The first `num_tokens` of the answer of the fake model."""
    return [expected_token(prompt, seed, len(prompt) + index) for index in range(num_tokens)]


@dataclass
class _Row:
    prompt: list[int]
    seed: int
    num_tokens: int


class FakeExecutor:
    """Keeps rows as a runner does and complains where a plan does not fit them.

    `gate` holds back results while it is cleared, and is cleared by itself at launch number `hold_at`;
    `on_launch` sees each plan, and may raise.
    """

    def __init__(self, on_launch: Callable[[StepPlan], None] = lambda plan: None) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.num_launched = 0
        self.num_drops = 0
        self.hold_at = -1
        self._has_launched = threading.Condition()
        self.is_shut_down = False
        self.on_launch = on_launch
        self._rows: dict[str, _Row] = {}

    def launch(self, plan: StepPlan) -> FakePendingStep:
        """Compute the step at once; the gate decides when its result can be had."""
        self.on_launch(plan)
        for request_id in plan.released:
            if self._rows.pop(request_id, None) is None and not self.num_drops:
                raise ValueError(f"{request_id} is not in the batch")
        for admitted in plan.admitted:
            if admitted.request_id in self._rows:
                raise ValueError(f"{admitted.request_id} is in the batch already")
            prompt = admitted.token_ids[: admitted.num_prompt_tokens]
            self._rows[admitted.request_id] = _Row(prompt, admitted.sampling.seed, len(admitted.token_ids))
        sampled: list[list[int]] = []
        for request_id, samples in zip(plan.request_ids, plan.samples, strict=True):
            row = self._rows[request_id]
            sampled.append([expected_token(row.prompt, row.seed, row.num_tokens)] if samples else [])
            row.num_tokens += samples
        with self._has_launched:
            self.num_launched += 1
            if self.num_launched == self.hold_at:
                self.gate.clear()
            self._has_launched.notify_all()
        return FakePendingStep(StepResult(plan.step_number, sampled), self.gate)

    def wait_for_launches(self, num_steps: int) -> None:
        """Wait until that many steps have been launched."""
        with self._has_launched:
            if not self._has_launched.wait_for(lambda: self.num_launched >= num_steps, LIMIT_S):
                raise TimeoutError(f"only {self.num_launched} of {num_steps} steps were launched")

    def drop(self) -> None:
        self.num_drops += 1

    def shutdown(self) -> None:
        self.is_shut_down = True


class FakePendingStep:
    """A step whose result comes when the gate is open."""

    def __init__(self, result: StepResult, gate: threading.Event) -> None:
        self._result = result
        self._gate = gate

    def result(self) -> StepResult:
        if not self._gate.wait(timeout=LIMIT_S):
            raise TimeoutError("the gate of the fake executor stayed shut")
        return self._result


def make_scheduler(
    *,
    num_blocks: int = 65,
    block_size: int = 4,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    max_steps_in_flight: int = 1,
    features: Sequence[SchedulerFeature] = (),
) -> Scheduler:
    """A real scheduler over a small pool; one of its blocks is the cache's placeholder."""
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        async_scheduling=max_steps_in_flight > 1,
        max_steps_in_flight=max_steps_in_flight,
    )
    cache = CacheConfig(num_blocks, (FullAttention(block_size),))
    core = build_core(config, cache, features=features)
    for feature in features:
        feature.wrap(core.scheduler, core.kv_cache)
    return core.scheduler


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Takes registrations and reports down, and sends the commands given to it."""

    def __init__(self, *, renew_after_ms: int = 1000, epoch: int = 0, lease_ms: int = 3000) -> None:
        self.registrations: list[member_pb2.EngineRegistration] = []
        self.reports: list[coordinator_pb2.EngineReport] = []
        self.results: list[command_pb2.CommandResult] = []
        self.goodbyes = 0
        self.num_sessions = 0
        self.commands: asyncio.Queue[command_pb2.Command] = asyncio.Queue()
        self.refusal: ServiceError | None = None  # what registrations are answered with
        self.num_to_end = 0  # sessions that are ended at their first report
        self.epoch = epoch
        self._renew_after_ms = renew_after_ms
        self._lease_ms = lease_ms
        self._changed = asyncio.Event()

    async def EngineSession(self, request_iterator, context) -> None:
        self.num_sessions += 1
        sender: asyncio.Task[None] | None = None
        writing = asyncio.Lock()  # a stream takes one write at a time
        try:
            async for request in request_iterator:
                match request.WhichOneof("message"):
                    case "register":
                        self.registrations.append(request.register)
                        if self.refusal is not None:
                            raise self.refusal
                        registered = coordinator_pb2.Registered(
                            lease_ms=self._lease_ms,
                            renew_after_ms=self._renew_after_ms,
                            coordinator_epoch=self.epoch,
                        )
                        async with writing:
                            await context.write(coordinator_pb2.EngineSessionResponse(registered=registered))
                        if sender is None:
                            sender = asyncio.create_task(self._send_commands(context, writing))
                    case "report":
                        self.reports.append(request.report)
                        if self.num_to_end:
                            self.num_to_end -= 1
                            raise Unavailable("the coordinator stops")
                    case "command_result":
                        self.results.append(request.command_result)
                    case "goodbye":
                        self.goodbyes += 1
                        return
                self._changed.set()
        finally:
            if sender is not None:
                sender.cancel()
            self.num_sessions -= 1
            self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what has come makes `condition` true."""
        async with asyncio.timeout(LIMIT_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def _send_commands(self, context, writing: asyncio.Lock) -> None:
        while True:
            command = await self.commands.get()
            async with writing:
                await context.write(coordinator_pb2.EngineSessionResponse(command=command))
