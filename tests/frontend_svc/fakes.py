"""A frontend in front of fake engines, a client of it, and what they all say."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

import grpc.aio
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from benchmarks.rig.processes import LOOPBACK
from frontend_svc.build import build_frontend
from frontend_svc.config import FrontendConfig
from frontend_svc.process.frontend import Frontend
from tests.frontend_svc.tokenizers import EOS, byte_level_tokenizer, id_of
from triptych.api.v1 import (
    chat_pb2_grpc,
    embedding_pb2_grpc,
    generate_pb2,
    inference_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    request_pb2_grpc,
    tokenizer_pb2_grpc,
)
from triptych.common.v1 import error_pb2, output_pb2, sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2, utility_pb2
from triptych_kit.addresses import join_address
from triptych_kit.channel import open_channel
from triptych_kit.errors import AlreadyExists, InvalidArgument, NotFound, ServiceError, to_parts
from triptych_kit.limits import INTERNAL

# An engine that speaks the real stream with scripted tokens.

TOKENIZER = byte_level_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size()
EOS_ID = id_of(TOKENIZER, EOS)
HEARTBEAT_S = 0.2
# Longer than anything takes here, however busy the machine: a test that runs into it has failed.
WAIT_S = 60.0
# What a frontend expects of an engine: on a busy machine heartbeats are late, which is no end of the stream.
LONG_HEARTBEAT_S = WAIT_S
MAX_MODEL_LEN = 512

Script = Callable[["FakeEngine", "FakeRequest"], None]


class FakeRequest:
    """An ADD an engine has got, on the session it came from."""

    def __init__(self, session: FakeSession, entry: add_pb2.AddEntry) -> None:
        self.session = session
        self.entry = entry
        self.handle: int = entry.handle
        self.abort_reason: int | None = None
        self.num_aborts = 0
        self.num_adoptions = 0

    @property
    def prompt(self) -> list[int]:
        return array("I", self.entry.prompt_token_ids).tolist()

    @property
    def output(self) -> list[int]:
        return array("I", self.entry.output_token_ids).tolist()


class FakeSession:
    """One frontend's stream: numbers what is sent."""

    def __init__(self) -> None:
        self.hello = session_pb2.Hello()
        self.steps: list[step_pb2.Step] = []
        self.outgoing: asyncio.Queue[engine_pb2.ConnectResponse | None] = asyncio.Queue()
        self._seq = 0

    def send(self, **content) -> None:
        if "step" in content:
            self.steps.append(content["step"])
        self._seq += 1
        self.outgoing.put_nowait(engine_pb2.ConnectResponse(seq=self._seq, **content))

    def send_bytes(self, content: bytes) -> None:
        """Send one message of a contract that this one does not know."""
        self._seq += 1
        message = engine_pb2.ConnectResponse.FromString(content)
        message.seq = self._seq
        self.outgoing.put_nowait(message)

    def skip(self) -> None:
        self._seq += 1


class FakeEngine(engine_pb2_grpc.EngineCoreServiceServicer):
    """Accepts any number of frontends. What it does with an ADD is its script's business."""

    def __init__(
        self,
        script: Script | None = None,
        *,
        model: str = "tiny",
        dp_rank: int = 0,
        generation_config: dict | None = None,
        chat_template: str = "{{ messages }}",
        is_ready: bool = True,
        is_draining: bool = False,
        max_inflight_adds: int = 0,
        max_model_len: int = MAX_MODEL_LEN,
        supported_tasks: Sequence[str] = ("generate",),
        config: dict | None = None,
        fingerprint: str = "f",
        schema_revision: int = 1,
        min_peer_revision: int = 0,
        features: Sequence[str] = ("adopt",),
        feature_set: session_pb2.FeatureSet | None = None,
        structured_output_backends: Sequence[str] = (),
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self.adapters = dict(adapters or {})  # digests by name
        self.epoch = 7
        self.calls: list[utility_pb2.UtilityCall] = []
        self.refusal: ServiceError | None = None  # of calls
        self.on_call: Callable[[], None] | None = None
        self.structured_output_backends = structured_output_backends
        self.features = features
        self.feature_set = feature_set
        self.num_asked_adoptions = 0
        self.script = script
        self.model = model
        self.dp_rank = dp_rank
        self.fingerprint = fingerprint
        self.is_ready = is_ready
        self.is_draining = is_draining  # in hello_ack
        self.max_inflight_adds = max_inflight_adds
        self.max_model_len = max_model_len
        self.supported_tasks = supported_tasks
        self.files = {
            session_pb2.ARTIFACT_KIND_TOKENIZER: TOKENIZER.to_str().encode(),
            session_pb2.ARTIFACT_KIND_TOKENIZER_CONFIG: json.dumps({"chat_template": chat_template}).encode(),
            session_pb2.ARTIFACT_KIND_GENERATION_CONFIG: json.dumps(generation_config or {}).encode(),
            session_pb2.ARTIFACT_KIND_CONFIG: json.dumps(config or {}).encode(),
        }
        self.requests: list[FakeRequest] = []
        self.sessions: list[FakeSession] = []
        self.num_connects = 0
        self.num_downloads = 0
        self.schema_revision = schema_revision
        self.min_peer_revision = min_peer_revision
        self.has_heartbeat = True
        self.heartbeat = session_pb2.Heartbeat(state=session_pb2.ENGINE_STATE_READY)
        self.num_heartbeats = 0  # since the newest session
        self.goodbyes: list[str] = []
        self.hints: list[session_pb2.FinishHint] = []
        self.cancels: list[engine_pb2.CancelTurn] = []
        self.received: list[str | None] = []  # kinds of messages after the hello
        self.address = ""
        self._server: grpc.aio.Server | None = None
        self._changed = asyncio.Event()

    async def start(self, address: str = join_address(LOOPBACK, 0)) -> str:
        self._server = grpc.aio.server(options=INTERNAL.options())
        engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.address = join_address(LOOPBACK, port)
        return self.address

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def leave(self) -> None:
        """End every stream behind what was sent, as after a drain. The engine can be reached again."""
        for session in self.sessions:
            session.outgoing.put_nowait(None)

    def die(self) -> None:
        """End every stream behind what was sent, as an engine does that fails. It can be reached again."""
        for session in self.sessions:
            session.send(dead={"reason": "it is killed"})
        self.leave()

    async def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until something that came made `condition` true."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await self._changed.wait()

    async def wait_for_requests(self, num_requests: int) -> list[FakeRequest]:
        """The first `num_requests` ADDs, once they are here."""
        await self.wait(lambda: len(self.requests) >= num_requests)
        return self.requests

    def step(
        self,
        rows: dict[FakeRequest, Sequence[int]],
        *,
        finished: dict[FakeRequest, step_pb2.StepFinished] | None = None,
        cached: dict[FakeRequest, int] | None = None,
        events: dict[FakeRequest, Sequence[step_pb2.StepEventKind]] | None = None,
        step_number: int = 1,
    ) -> None:
        """Send one step with these tokens to the session of its requests."""
        order = list(rows)
        columns = step_pb2.Step(
            step_number=step_number,
            handles=array("I", [request.handle for request in order]).tobytes(),
            num_tokens=bytes(len(ids) for ids in rows.values()),
            token_ids=array("I", [token_id for ids in rows.values() for token_id in ids]).tobytes(),
        )
        for request, record in (finished or {}).items():
            columns.finished.add().CopyFrom(record)
            columns.finished[-1].row = order.index(request)
        for request, num_cached in (cached or {}).items():
            columns.first.add(row=order.index(request), num_cached_tokens=num_cached)
        for request, kinds in (events or {}).items():
            columns.events.extend(
                step_pb2.StepEvent(row=order.index(request), kind=kind, age_us=1) for kind in kinds
            )
        order[0].session.send(step=columns)

    def pool(self, request: FakeRequest, tensor: tensor_pb2.Tensor | None, *, num_cached: int = 0) -> None:
        step = step_pb2.Step(
            step_number=1,
            handles=array("I", [request.handle]).tobytes(),
            first=[step_pb2.StepFirst(row=0, num_cached_tokens=num_cached)],
            finished=[step_pb2.StepFinished(row=0, reason=output_pb2.FINISH_REASON_STOP)],
        )
        if tensor is not None:
            step.extras.add(row=0, pooling_output=tensor)
        request.session.send(step=step)

    def become_ready(self) -> None:
        self.is_ready = True
        for session in self.sessions:
            session.send(ready=self._ready())

    async def Connect(
        self, request_iterator: AsyncIterator[engine_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[engine_pb2.ConnectResponse, None]:
        """Hello, hello_ack, ready, then whatever was sent."""
        session = FakeSession()
        first = await anext(aiter(request_iterator))
        session.hello = first.hello
        self.num_connects += 1
        self.num_heartbeats = 0
        reader = asyncio.ensure_future(self._read(session, request_iterator))
        heart = asyncio.ensure_future(self._beat(session))
        yield engine_pb2.ConnectResponse(
            hello_ack=session_pb2.HelloAck(
                engine_id=f"engine-{self.dp_rank}",
                engine_epoch=self.epoch,
                dp_rank=self.dp_rank,
                dp_size=2,
                state=self._state(),
                max_inflight_adds=self.max_inflight_adds,
                ack_interval_messages=4,
                ack_interval_ms=200,
                features=self.features,
                feature_set=self.feature_set,
                schema_revision=self.schema_revision,
                min_peer_revision=self.min_peer_revision,
            )
        )
        if self.is_ready:
            session.send(ready=self._ready())
        self.sessions.append(session)
        self._notify()
        try:
            while (message := await session.outgoing.get()) is not None:
                yield message
        finally:
            reader.cancel()
            heart.cancel()
            self.sessions.remove(session)
            self._notify()

    async def GetArtifacts(
        self, request: engine_pb2.GetArtifactsRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[engine_pb2.GetArtifactsResponse, None]:
        self.num_downloads += 1
        self._notify()
        for artifact in self._artifacts():
            if (request.kinds and artifact.kind not in request.kinds) or (
                artifact.sha256 in request.known_sha256
            ):
                continue
            content = self.files[artifact.kind]
            for offset in range(0, len(content), 4096):
                chunk = content[offset : offset + 4096]
                yield engine_pb2.GetArtifactsResponse(artifact=artifact, offset=offset, chunk=chunk)

    async def _read(self, session: FakeSession, messages: AsyncIterator[engine_pb2.ConnectRequest]) -> None:
        async for message in messages:
            self.received.append(message.WhichOneof("message"))
            for entry in message.add.entries:
                request = FakeRequest(session, entry)
                self.requests.append(request)
                if self.script is not None:
                    self.script(self, request)
            for wanted in message.adopt.entries:
                self.num_asked_adoptions += 1
                self._adopt(session, wanted)
            if message.HasField("utility"):
                self._call(session, message.utility)
            if message.HasField("finish_hint"):
                self.hints.append(message.finish_hint)
            if message.HasField("cancel_turn"):
                self.cancels.append(message.cancel_turn)
            for request in self.requests:
                if request.session is session and request.handle in message.abort.handles:
                    request.abort_reason = message.abort.reason
                    request.num_aborts += list(message.abort.handles).count(request.handle)
            if message.HasField("goodbye"):
                self.goodbyes.append(message.goodbye.reason)
                if not message.goodbye.leaves_adoptable:
                    self._give_up(session)
            self._notify()
        session.outgoing.put_nowait(None)

    def _call(self, session: FakeSession, call: utility_pb2.UtilityCall) -> None:
        """Change the adapters, unless `refusal` is what is to be answered."""
        self.calls.append(call)
        if self.on_call is not None:
            self.on_call()
        result = utility_pb2.UtilityResult(call_id=call.call_id, done={})
        refusal = self.refusal
        if call.HasField("add_adapter"):
            added = call.add_adapter
            if added.name in self.adapters and not added.replace:
                refusal = refusal or AlreadyExists(f"adapter {added.name} is loaded")
            else:
                digest = hashlib.sha256(added.path.encode()).hexdigest()
                result.adapters.adapters.add(name=added.name, digest=digest)
        elif call.remove_adapter.name not in self.adapters:
            name = call.remove_adapter.name
            refusal = NotFound(f"no adapter {name}", resource_type="adapter", resource_name=name)
        if refusal is not None:
            code, text, details = to_parts(refusal)
            result.failure.CopyFrom(error_pb2.ErrorStatus(code=code, message=text, details=details))
        elif call.HasField("add_adapter"):
            self.adapters[call.add_adapter.name] = result.adapters.adapters[0].digest
        else:
            del self.adapters[call.remove_adapter.name]
        self.become_ready()
        session.send(utility_result=result)

    def _give_up(self, session: FakeSession) -> None:
        for request in self.requests:
            if request.session is session:
                request.entry.resume_state = b""

    def _adopt(self, session: FakeSession, wanted: engine_pb2.AdoptEntry) -> None:
        """Hand over a request whose session is gone, and let the script go on with it where there is more."""
        kept = [
            request
            for request in self.requests
            if request.entry.request_id == wanted.request_id
            and request.entry.resume_state
            and request.abort_reason in (None, engine_pb2.ABORT_REASON_STOP_STRING)
        ]
        if not kept or kept[-1].session in self.sessions:
            code = grpc.StatusCode.FAILED_PRECONDITION if kept else grpc.StatusCode.NOT_FOUND
            status = error_pb2.ErrorStatus(code=code.value[0], message="not to be had")
            session.send(add_rejected=engine_pb2.AddRejected(handle=wanted.handle, status=status))
            return
        request = kept[-1]
        steps = [one for one in request.session.steps if _row_of(one, request.handle) is not None]
        row = _merged([(one, _row_of(one, request.handle)) for one in steps], wanted.handle)
        request.session, request.handle, request.abort_reason = session, wanted.handle, None
        request.num_adoptions += 1
        adopted = engine_pb2.Adopted(
            handle=wanted.handle,
            attempt=request.entry.attempt,
            prompt_token_ids=request.entry.prompt_token_ids,
            resume_state=request.entry.resume_state,
        )
        session.send(adopted=adopted)
        session.send(step=row)
        request.entry.output_token_ids = row.token_ids
        if self.script is not None and not row.finished:
            self.script(self, request)

    async def _beat(self, session: FakeSession) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self.has_heartbeat:
                session.send(heartbeat=self.heartbeat)
                self.num_heartbeats += 1
                self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _state(self) -> session_pb2.EngineState:
        if self.is_draining:
            return session_pb2.ENGINE_STATE_DRAINING
        return session_pb2.ENGINE_STATE_READY if self.is_ready else session_pb2.ENGINE_STATE_LOADING

    def _ready(self) -> session_pb2.Ready:
        return session_pb2.Ready(
            model_name=self.model,
            fingerprint=session_pb2.Fingerprint(digest=self.fingerprint),
            artifacts=self._artifacts(),
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS_ID],
            supported_tasks=self.supported_tasks,
            structured_output_backends=self.structured_output_backends,
            structured_output_keywords=["type"] if self.structured_output_backends else (),
            model_folder=f"/models/{self.model}",
            served_adapters=[
                session_pb2.ServedAdapter(name=name, digest=digest)
                for name, digest in sorted(self.adapters.items())
            ],
        )

    def _artifacts(self) -> list[session_pb2.Artifact]:
        return [
            session_pb2.Artifact(
                kind=kind, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content)
            )
            for kind, content in self.files.items()
        ]


def _row_of(step: step_pb2.Step, handle: int) -> int | None:
    handles = array("I", step.handles).tolist()
    return handles.index(handle) if handle in handles else None


def _merged(rows: Sequence[tuple[step_pb2.Step, int | None]], handle: int) -> step_pb2.Step:
    """One row of what a request has in steps, with log probabilities only where it is alone."""
    merged = step_pb2.Step(step_number=1, handles=array("I", [handle]).tobytes())
    counts = []
    for step, row in rows:
        assert row is not None
        start = 4 * sum(step.num_tokens[:row])
        merged.token_ids += step.token_ids[start : start + 4 * step.num_tokens[row]]
        counts += [step.num_tokens[row]] if step.num_tokens[row] else []
        merged.sampled_logprobs += step.sampled_logprobs
        merged.sampled_ranks += step.sampled_ranks
        if step.HasField("top_logprobs"):
            merged.top_logprobs.k = step.top_logprobs.k
            merged.top_logprobs.token_ids += step.top_logprobs.token_ids
            merged.top_logprobs.logprobs += step.top_logprobs.logprobs
        for records, of_merged in (
            (step.first, merged.first),
            (step.finished, merged.finished),
            (step.extras, merged.extras),
        ):
            for record in records:
                if record.row == row:
                    of_merged.add().CopyFrom(record)
                    of_merged[-1].row = 0
    merged.num_tokens = bytes([sum(counts)])
    if len(counts) > 1:
        merged.parts.add(row=0, num_tokens=counts)
    return merged


def answer(text: str, *, token_ids: Sequence[int] | None = None) -> Script:
    """A script that answers every request with `text`, a token a step, and then the end of sequence."""
    ids = list(TOKENIZER.encode(text).ids if token_ids is None else token_ids)

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        for index, token_id in enumerate(ids):
            engine.step({request: [token_id]}, cached={request: 16} if index == 0 else None)
        engine.step({request: [EOS_ID]}, finished={request: AT_EOS})

    return script


def refusing(message: str, reason: str) -> Script:
    """A script that refuses the constraint of a request, as an engine does once it has looked at it."""

    def script(engine: FakeEngine, request: FakeRequest) -> None:
        error = InvalidArgument(message, field="sampling.structured_output", reason=reason)
        code, text, details = to_parts(error)
        refused = step_pb2.StepFinished(
            reason=output_pb2.FINISH_REASON_ERROR, message=text, code=code, details=details
        )
        engine.step({request: []}, finished={request: refused})

    return script


AT_EOS = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_STOP, eos_token_id=EOS_ID)
AT_LENGTH = step_pb2.StepFinished(reason=output_pb2.FINISH_REASON_LENGTH)


# A frontend in front of such engines, and a client of it.


class Client:
    """Stubs of a frontend's public services."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.chat = chat_pb2_grpc.ChatServiceStub(channel)
        self.embedding = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self.model = model_pb2_grpc.ModelServiceStub(channel)
        self.request = request_pb2_grpc.RequestServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def wait_ready(self, is_ready: bool = True) -> None:
        """Wait until health says that requests are taken, or are not."""
        status = (
            health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        request = health_pb2.HealthCheckRequest(service="triptych.api.v1.InferenceService")
        watch = self.health.Watch(request, timeout=WAIT_S)
        async for response in watch:
            if response.status == status:
                watch.cancel()
                return

    async def until_engines_are_ready(self, num_engines: int) -> None:
        """Wait until this many engines can be picked."""
        async with asyncio.timeout(WAIT_S):
            while True:
                info = await self.model.GetServerInfo(model_pb2.GetServerInfoRequest())
                if [engine.state for engine in info.engines].count("ready") == num_engines:
                    return
                # Text workers come after all else, also after a client that asks without a pause.
                await asyncio.sleep(0.01)

    def generate(
        self, prompt: str | Sequence[int] = "the cat", *, timeout: float = WAIT_S, metadata=(), **fields
    ):
        """A Generate call with sampling fields and request fields distinguished by name."""
        return self.inference.Generate(make_request(prompt, **fields), timeout=timeout, metadata=metadata)


def make_request(prompt: str | Sequence[int] = "the cat", **fields) -> generate_pb2.GenerateRequest:
    """A request; fields of SamplingParams go to its sampling."""
    of_sampling = {name for name in fields if name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name}
    sampling = sampling_pb2.SamplingParams(**{name: fields[name] for name in of_sampling})
    rest = {name: value for name, value in fields.items() if name not in of_sampling}
    request = generate_pb2.GenerateRequest(sampling=sampling, **rest)
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


@contextlib.asynccontextmanager
async def serving(
    *engines: FakeEngine,
    waits_ready: bool = True,
    start_engines: bool = True,
    heartbeat_s: float = LONG_HEARTBEAT_S,
    **options,
) -> AsyncGenerator[tuple[Client, Frontend], None]:
    """A frontend that uses `engines`, and a client of it. On leaving nothing may be in flight."""
    for engine in engines:
        if start_engines:
            await engine.start()
    config = FrontendConfig(
        **{
            "host": LOOPBACK,
            "port": 0,
            "engine": tuple(engine.address for engine in engines),
            "text_workers": 1,
            # Short, so that what finds no other engine ends soon; a test that waits for one sets how long.
            "reconnect_window_s": 0.5,
            **options,
        }
    )
    frontend = build_frontend(config, heartbeat_s=heartbeat_s)
    address = await frontend.servers.public.start()
    frontend.connect(address)
    try:
        async with open_channel(address, profile="public") as channel:
            client = Client(channel)
            if waits_ready:
                await client.wait_ready()
            yield client, frontend
            async with asyncio.timeout(WAIT_S):
                await frontend.drain()
            assert frontend.requests.admission.num_queued == 0
            assert len(frontend.requests.open) == 0
            assert sum(one.requests.num_in_flight for one in frontend.engines.directory.clients()) == 0
    finally:
        await frontend.servers.public.stop(0)
        await frontend.close()
        for engine in engines:
            await engine.kill()


@contextlib.asynccontextmanager
async def serving_one(**options) -> AsyncGenerator[tuple[FakeEngine, Client, Frontend], None]:
    """A frontend with one engine that answers when a test says so."""
    engine = FakeEngine()
    async with serving(engine, **options) as (client, frontend):
        yield engine, client, frontend


async def read_all(call) -> tuple[generate_pb2.Started, str, list[int], generate_pb2.Finished]:
    """Everything a Generate stream says, with text and ids put together."""
    started, finished, text, ids = None, None, "", []
    positions = []
    async for response in call:
        positions.append(response.position)
        kind = response.WhichOneof("event")
        if kind == "started":
            started = response.started
        elif kind == "delta":
            assert started is not None
            text += response.delta.text
            ids += response.delta.token_ids
        else:
            finished = response.finished
    assert positions == list(range(1, len(positions) + 1))
    assert started is not None
    assert finished is not None
    return started, text, ids, finished


def details_of(error: grpc.aio.AioRpcError) -> str:
    """The names and contents of an error's details, as text."""
    status = rpc_status.from_call(error)
    shown = []
    for detail in status.details if status is not None else ():
        for kind in (
            error_details_pb2.BadRequest,
            error_details_pb2.ErrorInfo,
            error_details_pb2.ResourceInfo,
        ):
            message = kind()
            if detail.Unpack(message):
                shown.append(f"{kind.__name__} {message}")
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            shown.append("RetryInfo")
    return " ".join(shown)
