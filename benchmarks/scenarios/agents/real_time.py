"""Jobs at an engine process with a model, in the time that it takes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import re
import tempfile
import time
import uuid
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from benchmarks.rig.processes import Fleet, ServicePlan, ServiceProcess
from benchmarks.scenarios.agents.virtual_time import BLOCK_SIZE, Contestant, Outcome
from benchmarks.scenarios.agents.workload import Job
from engine_svc.features.pins.estimator import FixedTtl, LogNormalTtl
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2
from triptych_kit.channel import open_channel
from triptych_kit.http.admin_http import read_page

_STEP_TOKENS = re.compile(r"^triptych_engine_step_tokens_sum\{.*\} (\S+)$", re.MULTILINE)
_PAGE_LIMIT_S = 30.0
_NUM_WARM_TOKENS = 512
# An engine's flag takes no pin of 0 s. One as short is over before the next step is planned.
_NO_TIME_S = 1e-6


class EngineFailed(Exception):
    """The engine has refused a turn, or ended it with an error."""


def is_offered(contestant: Contestant) -> bool:
    """Whether an engine can serve so: it has pins in the order of jobs alone."""
    return (contestant.rule is None) is (contestant.policy != "continuum")


async def serve(
    contestant: Contestant,
    model: Path,
    jobs: Sequence[Job],
    num_open: int,
    num_blocks: int,
    max_model_len: int,
    spread_s: float,
) -> Outcome:
    """Serve jobs, of which `num_open` arrive in the first `spread_s` seconds, another when one ends."""
    flags = (
        f"--num-kv-blocks={num_blocks}",
        f"--block-size={BLOCK_SIZE}",
        f"--max-model-len={max_model_len}",
        *_flags_of(contestant),
    )
    async with _engine(model, flags) as engine, _session(engine.address) as session:
        # What a first step sets up is no time of a job's.
        prompt = array("I", range(100, 100 + _NUM_WARM_TOKENS)).tobytes()
        await session.run(add_pb2.AddEntry(prompt_token_ids=prompt, sampling=_sampling(8)))
        num_before = await _num_step_tokens(engine)
        client = _Client(session)
        waiting = iter(jobs)
        async with asyncio.TaskGroup() as tasks:
            for index in range(num_open):
                tasks.create_task(client.run_jobs(waiting, spread_s * index / num_open))
        client.outcome.num_tokens = round(await _num_step_tokens(engine) - num_before)
    return client.outcome


def _flags_of(contestant: Contestant) -> list[str]:
    flags = [f"--scheduling-policy={contestant.policy}"]
    match contestant.rule:
        case None:
            return flags
        case FixedTtl(seconds):
            flags += ["--pin-ttl-rule=fixed", f"--pin-ttl-s={max(seconds, _NO_TIME_S)}"]
        case LogNormalTtl(seconds, max_gap_s):
            flags += ["--pin-ttl-rule=lognormal", f"--pin-ttl-s={seconds}", f"--pin-threshold-s={max_gap_s}"]
        case _:
            flags.append("--pin-ttl-rule=utility")
    pressure = "pins-first" if contestant.gives_pins_first else "preempt-first"
    return [*flags, f"--continuum-pressure={pressure}"]


class _Client:
    """Has jobs served, and notes what becomes of them."""

    def __init__(self, session: _Session) -> None:
        self.outcome = Outcome()
        self._session = session
        self._names = (f"job-{number}" for number in itertools.count())

    async def run_jobs(self, waiting: Iterator[Job], at: float) -> None:
        """From an instant on one job after the other, until none waits."""
        await asyncio.sleep(at)
        for job in waiting:
            await self._run_job(job)

    async def _run_job(self, job: Job) -> None:
        began_at = time.monotonic()
        name = next(self._names)
        token_ids: list[int] = []
        for turn in job.turns:
            token_ids += turn.input_ids
            is_last = turn is job.turns[-1]
            sent_at = time.monotonic()
            answer = await self._session.run(
                add_pb2.AddEntry(
                    prompt_token_ids=array("I", token_ids).tobytes(),
                    sampling=_sampling(turn.num_output_tokens),
                    job_id=name,
                    is_last_step=is_last,
                    tool_name=turn.tool,
                )
            )
            token_ids += answer.token_ids
            self.outcome.waits_s.append(answer.first_at - sent_at)
            if not is_last:
                await asyncio.sleep(turn.gap_s)
        self.outcome.completions_s.append(time.monotonic() - began_at)
        self.outcome.num_needed_tokens += len(token_ids) - 1


def _sampling(num_tokens: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@dataclass(slots=True)
class _Answer:
    """What has come of a request."""

    token_ids: list[int] = field(default_factory=list)
    first_at: float = math.inf
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class _Session:
    """Requests of one session of an engine."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._call = call
        self._handles = itertools.count()
        self._open: dict[int, _Answer] = {}
        self._writing = asyncio.Lock()

    async def open(self) -> None:
        hello = session_pb2.Hello(
            schema_revision=1, frontend_id="agents", session_id=uuid.uuid4().hex, frontend_epoch=1
        )
        await self._call.write(engine_pb2.ConnectRequest(hello=hello))

    async def run(self, entry: add_pb2.AddEntry) -> _Answer:
        """Send a request and wait for its end."""
        entry.handle = next(self._handles)
        entry.request_id = f"turn-{entry.handle}"
        answer = self._open[entry.handle] = _Answer()
        async with self._writing:
            await self._call.write(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=[entry])))
        await answer.ended.wait()
        return answer

    async def read_forever(self) -> None:
        """Take in what the engine sends. Raises EngineFailed where it serves no more."""
        while isinstance(response := await self._call.read(), engine_pb2.ConnectResponse):
            if response.HasField("add_rejected"):
                raise EngineFailed(response.add_rejected.status.message)
            self._take(response.step)
        raise EngineFailed(await self._call.details())

    def _take(self, step: step_pb2.Step) -> None:
        now = time.monotonic()
        handles = array("I", step.handles)
        counts = array("I", step.num_tokens_wide) if step.num_tokens_wide else step.num_tokens
        tokens = iter(array("I", step.token_ids))
        for handle, count in zip(handles, counts or bytes(len(handles)), strict=True):
            if count:
                answer = self._open[handle]
                answer.first_at = min(answer.first_at, now)
                answer.token_ids += itertools.islice(tokens, count)
        for finished in step.finished:
            if finished.reason == output_pb2.FINISH_REASON_ERROR:
                raise EngineFailed(finished.message)
            self._open.pop(handles[finished.row]).ended.set()


@contextlib.asynccontextmanager
async def _session(address: str) -> AsyncIterator[_Session]:
    async with open_channel(address, profile="internal") as channel, asyncio.TaskGroup() as tasks:
        call = engine_pb2_grpc.EngineCoreServiceStub(channel).Connect()
        session = _Session(call)
        await session.open()
        reading = tasks.create_task(session.read_forever())
        yield session
        reading.cancel()
        call.cancel()


@contextlib.asynccontextmanager
async def _engine(model: Path, flags: Sequence[str]) -> AsyncIterator[ServiceProcess]:
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        async with Fleet(Path(folder)) as fleet:
            engine = fleet.add(ServicePlan("engine", 0, (str(model), *flags)))
            await fleet.start()
            yield engine


async def _num_step_tokens(engine: ServiceProcess) -> float:
    """Tokens of all steps of the engine so far."""
    page = await read_page(engine.admin_http, "/metrics", limit_s=_PAGE_LIMIT_S)
    return sum(map(float, _STEP_TOKENS.findall(page.decode())))
