"""An engine that the kit plays: it records what a frontend sends, and sends what a case says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import grpc.aio

from triptych.common.v1 import output_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2
from triptych_conformance.cases import Finding, expect, fail
from triptych_conformance.wire import Wire
from triptych_kit.addresses import join_address, loopback_of, split_address
from triptych_kit.errors import ServiceError, to_status
from triptych_kit.limits import INTERNAL
from triptych_kit.rules import MessageRules

REVISION = 1
VOCAB_SIZE = 1000
EOS_TOKEN_ID = VOCAB_SIZE - 1
MAX_MODEL_LEN = 2048
MAX_INFLIGHT_ADDS = 256
HIDDEN_SIZE = 64
INPUT_SEGMENTS = "input_segments"
HEARTBEAT_S = 0.5
REPLAY_WINDOW_MS = 5000
ACK_INTERVAL_MESSAGES = 16
ACK_INTERVAL_MS = 50
_MAX_FRAME_BYTES = 64 * 1024 * 1024
_HELLO_RULES = MessageRules(session_pb2.Hello)
_BLOB_TTL_MS = 60_000


class Session:
    """A frontend's session here. Its messages are numbered when they are sent, with a stream or without."""

    def __init__(self, hello: session_pb2.Hello, features: list[str]) -> None:
        self.hellos = [hello]
        self.features = features
        self.adds: list[add_pb2.AddEntry] = []
        self.blobs_at_add: dict[str, bytes] = {}  # what was uploaded before the last of them
        self.in_flight: set[int] = set()
        self.idle: set[int] = set()  # of these, those whose turns have ended
        self.aborts: list[tuple[int, int]] = []  # handles and reasons
        self.cancels: list[tuple[int, int]] = []  # of turns: handles and segments
        self.hints: set[int] = set()  # handles of requests that have ended
        self.last_ack = 0
        self.goodbye: engine_pb2.Goodbye | None = None
        self.num_streams = 0  # that are open
        self.error: ServiceError | None = None
        self.has_ended = False
        self.changed = asyncio.Event()
        self._messages: list[bytes | None] = []

    @property
    def last_seq(self) -> int:
        return len(self._messages)

    def send(self, **content: Any) -> None:
        """Send a message with the next number."""
        message = engine_pb2.ConnectResponse(seq=self.last_seq + 1, **content)
        if "heartbeat" in content:
            message.heartbeat.last_seq = self.last_seq
        self.send_bytes(message.SerializeToString())

    def send_bytes(self, serialized: bytes | None) -> None:
        """Send a serialized message; None takes a number and sends nothing."""
        self._messages.append(serialized)
        self.changed.set()

    def send_tokens(
        self,
        handle: int,
        token_ids: Sequence[int],
        *,
        is_first: bool = False,
        ends: bool = False,
        **fields: Any,
    ) -> None:
        """Send a step with one row. fields: of the step, instead of or beside the usual ones."""
        step = step_pb2.Step(
            **{
                "step_number": self.last_seq,
                "handles": struct.pack("<I", handle),
                "num_tokens": bytes([len(token_ids)]),
                "token_ids": struct.pack(f"<{len(token_ids)}I", *token_ids),
                **fields,
            }
        )
        if is_first:
            step.first.add(row=0)
            step.events.add(row=0, kind=step_pb2.STEP_EVENT_KIND_SCHEDULED, age_us=1000)
        if ends:
            step.finished.add(row=0, reason=output_pb2.FINISH_REASON_LENGTH)
        for finished in step.finished:
            if finished.turn_ended:
                self.idle.add(handle)
            else:
                self.idle.discard(handle)
                self.in_flight.discard(handle)
        self.send(step=step)

    def abort(self, handle: int) -> None:
        """End a request in flight with ABORT."""
        if handle in self.in_flight:
            self.send_tokens(handle, [], finished=[{"row": 0, "reason": output_pb2.FINISH_REASON_ABORT}])

    def end(self, error: ServiceError | None = None) -> None:
        """End the session and its streams, with OK or `error`."""
        self.has_ended, self.error = True, error
        self.changed.set()

    def next_after(self, sent: int) -> tuple[int, bytes] | None:
        """The number and the bytes of the first message after `sent`."""
        for seq in range(sent + 1, self.last_seq + 1):
            serialized = self._messages[seq - 1]
            if serialized is not None:
                return seq, serialized
        return None


class PlayedEngine(engine_pb2_grpc.EngineCoreServiceServicer):
    """Listens for frontends. What a case changes of it is reset by `restart`.

    on_change: called whenever a frontend has sent something, or a stream has begun or ended.
    """

    def __init__(self, number: int, listen: str, on_change: Callable[[], object]) -> None:
        self.engine_id = f"conformance-{number}"
        self.address = listen
        self.sessions: list[Session] = []
        self.finding: Finding | None = None  # about what a frontend sent
        self._listen = listen
        self._on_change = on_change
        self.is_alive = True
        self.num_hellos = self.num_adds = 0  # of this process and those before
        self._files = {session_pb2.ARTIFACT_KIND_TOKENIZER: _tokenizer()}
        self._reset()

    def _reset(self) -> None:
        self.epoch = secrets.randbits(63) | 1
        self.is_changed = False
        self.features: tuple[str, ...] = ("resume",)
        self.digest = "c" * 64
        self.state = session_pb2.ENGINE_STATE_READY  # in hello_ack
        self.is_ready = True  # ready is sent
        self.greets = True  # hello_ack is sent
        self.resumes = True
        self.min_peer_revision = 0
        self.max_frame_bytes = _MAX_FRAME_BYTES
        self.blobs: dict[str, bytes] = {}
        self.adapters: dict[str, str] = {}  # digests by name
        self.heartbeat = session_pb2.Heartbeat()

    async def start(self) -> None:
        self._server = grpc.aio.server(options=INTERNAL.options())
        connect = grpc.stream_stream_rpc_method_handler(
            self.Connect, request_deserializer=engine_pb2.ConnectRequest.FromString, response_serializer=None
        )
        name = engine_pb2.DESCRIPTOR.services_by_name["EngineCoreService"].full_name
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"Connect": connect}),)
        )
        engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(self, self._server)
        loopback = loopback_of(split_address(self._listen)[0])
        port = self._server.add_insecure_port(join_address(loopback, 0))
        await self._server.start()
        self.wire = Wire(self._listen, join_address(loopback, port))
        self.address = await self.wire.start()
        self._beating = asyncio.create_task(self._beat_forever())

    async def stop(self) -> None:
        self._beating.cancel()
        await self.wire.stop()
        await self._server.stop(0)

    def change(self, **attributes: Any) -> None:
        """Behave otherwise until the next `restart`."""
        for name, value in attributes.items():
            setattr(self, name, value)
            self.is_changed = True

    def kill(self) -> None:
        """Be dead until `restart`: connections break, and others are refused."""
        self.is_alive, self.is_changed = False, True
        self.wire.refuse()

    async def restart(self, **changes: Any) -> None:
        """Be another process at the same address, with these attributes; connections break."""
        self.sessions.clear()
        self._reset()
        self.change(**changes)
        self.wire.thaw()
        self.wire.cut()
        if not self.is_alive:
            await self.wire.start()
            self.is_alive = True

    @property
    def session(self) -> Session | None:
        """The newest session that has a stream and has not ended."""
        open_ones = [one for one in self.sessions if one.num_streams and not one.has_ended]
        return open_ones[-1] if open_ones else None

    def become_ready(self) -> None:
        self.change(is_ready=True, state=session_pb2.ENGINE_STATE_READY)
        for session in self.sessions:
            session.send(ready=self._ready())

    async def GetArtifacts(
        self, request: engine_pb2.GetArtifactsRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GetArtifactsResponse]:
        """The tokenizer, whose tokens are words: w0, w1 and so on."""
        for artifact in self._artifacts():
            is_known = artifact.sha256 in request.known_sha256
            if not is_known and (not request.kinds or artifact.kind in request.kinds):
                yield engine_pb2.GetArtifactsResponse(artifact=artifact, chunk=self._files[artifact.kind])

    async def UploadBlob(
        self, requests: AsyncIterator[engine_pb2.UploadBlobRequest], context: Any
    ) -> engine_pb2.UploadBlobResponse:
        header, content = engine_pb2.UploadBlobHeader(), b""
        async for request in requests:
            if request.HasField("header"):
                header = request.header
            content += request.chunk
        digest = hashlib.sha256(content).hexdigest()
        try:
            expect(header.size_bytes == len(content), f"an upload of {header.size_bytes} bytes", len(content))
            expect(header.sha256 == digest, f"an upload with the digest {header.sha256}", digest)
        except Finding as finding:
            self._find(finding)
        self.blobs[digest] = content
        return engine_pb2.UploadBlobResponse(sha256=digest, ttl_ms=_BLOB_TTL_MS)

    async def Connect(self, requests: AsyncIterator[engine_pb2.ConnectRequest], context: Any) -> None:
        """A session as a case wants it, with all messages that the frontend has not processed."""
        first = await anext(aiter(requests), None)
        if first is None:
            return
        try:
            _check_hello(first)
        except Finding as finding:
            self._find(finding)
            return
        hello = first.hello
        self.num_hellos += 1
        self._on_change()
        if not self.greets:
            # Until the frontend gives up, or the connection breaks.
            await asyncio.Event().wait()
        resumed = self._resumed_by(hello)
        features = [
            name for name in self.features if name in hello.features or getattr(hello.feature_set, name)
        ]
        session = resumed or Session(hello, features)
        if resumed is None:
            self.sessions.append(session)
            if self.is_ready:
                session.send(ready=self._ready())
        else:
            session.hellos.append(hello)
        session.num_streams += 1
        reader = asyncio.create_task(self._read(session, requests))
        reader.add_done_callback(lambda _: session.changed.set())
        self._on_change()
        try:
            ack = engine_pb2.ConnectResponse(
                hello_ack=self._hello_ack(features, resume_ok=resumed is not None)
            )
            await context.write(ack.SerializeToString())
            await self._write(session, hello.resume.last_seq if resumed else 0, reader, context)
        finally:
            reader.cancel()
            session.num_streams -= 1
            self._on_change()
        if session.error is not None:
            await context.abort_with_status(to_status(session.error))

    def _resumed_by(self, hello: session_pb2.Hello) -> Session | None:
        if not self.resumes or not hello.HasField("resume") or hello.resume.engine_epoch != self.epoch:
            return None
        for session in self.sessions:
            if (
                session.features
                and not session.has_ended
                and session.hellos[0].session_id == hello.session_id
            ):
                return session
        return None

    async def _write(self, session: Session, sent: int, reader: asyncio.Task[None], context: Any) -> None:
        while not reader.done():
            session.changed.clear()
            while (following := session.next_after(sent)) is not None:
                sent, serialized = following
                await context.write(serialized)
            if session.has_ended or session.goodbye is not None:
                return
            await session.changed.wait()

    async def _read(self, session: Session, requests: AsyncIterator[engine_pb2.ConnectRequest]) -> None:
        async for message in requests:
            if message.ByteSize() > self.max_frame_bytes:
                self._find(Finding(f"messages of {self.max_frame_bytes} bytes at most", message.ByteSize()))
            match message.WhichOneof("message"):
                case "hello":
                    self._find(Finding("hello once in a stream", "a second one"))
                case "add":
                    self.num_adds += 1
                    for entry in message.add.entries:
                        self._check_turn(session, entry)
                    session.adds += message.add.entries
                    session.blobs_at_add.update(self.blobs)
                    handles = {entry.handle for entry in message.add.entries}
                    session.in_flight |= handles
                    session.idle -= handles
                    session.hints -= handles
                case "abort":
                    session.aborts += [(handle, message.abort.reason) for handle in message.abort.handles]
                case "cancel_turn":
                    session.cancels.append((message.cancel_turn.handle, message.cancel_turn.segment))
                case "finish_hint":
                    self._take_hint(session, message.finish_hint.handle)
                case "ack":
                    last_seq = message.ack.last_seq
                    if last_seq > session.last_seq:
                        sent = f"acknowledgements up to {session.last_seq}, what was sent"
                        self._find(Finding(sent, last_seq))
                    session.last_ack = max(session.last_ack, last_seq)
                case "goodbye":
                    session.goodbye = message.goodbye
                    session.changed.set()
            self._on_change()

    def _check_turn(self, session: Session, entry: add_pb2.AddEntry) -> None:
        if (entry.resumable or entry.segment) and INPUT_SEGMENTS not in session.features:
            self._find(Finding(f"no resumable request without the feature {INPUT_SEGMENTS}", repr(entry)))
        is_running = entry.handle in session.in_flight - session.idle
        if entry.segment and entry.resumable and is_running and entry not in session.adds:
            self._find(Finding("a segment after the end of the turn before", repr(entry)))

    def _take_hint(self, session: Session, handle: int) -> None:
        if handle in session.in_flight and handle not in dict(session.aborts):
            self._find(
                Finding("finish_hint after the end of its request", f"one of handle {handle} in flight")
            )
        if handle in session.hints:
            self._find(Finding("finish_hint once", f"two of handle {handle}"))
        session.hints.add(handle)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self.heartbeat.state = self.state
            for session in self.sessions:
                if session.num_streams and not session.has_ended:
                    session.send(heartbeat=self.heartbeat)

    def _find(self, finding: Finding) -> None:
        self.finding = self.finding or finding
        self._on_change()

    def _hello_ack(self, features: list[str], *, resume_ok: bool) -> session_pb2.HelloAck:
        return session_pb2.HelloAck(
            engine_id=self.engine_id,
            engine_epoch=self.epoch,
            dp_size=1,
            features=features,
            feature_set=session_pb2.FeatureSet(**dict.fromkeys(features, True)),
            state=self.state,
            resume_ok=resume_ok,
            ack_interval_messages=ACK_INTERVAL_MESSAGES,
            ack_interval_ms=ACK_INTERVAL_MS,
            replay_window_ms=REPLAY_WINDOW_MS if "resume" in features else 0,
            replay_window_bytes=8 * 1024 * 1024,
            max_frame_bytes=self.max_frame_bytes,
            max_inflight_adds=MAX_INFLIGHT_ADDS,
            schema_revision=REVISION,
            min_peer_revision=self.min_peer_revision,
        )

    def _ready(self) -> session_pb2.Ready:
        return session_pb2.Ready(
            model_name="conformance",
            fingerprint=session_pb2.Fingerprint(digest=self.digest, vocab_size=VOCAB_SIZE),
            artifacts=self._artifacts(),
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=MAX_INFLIGHT_ADDS,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS_TOKEN_ID],
            supported_tasks=["generate"],
            hidden_size=HIDDEN_SIZE,
            takes_prompt_embeds=True,
            adapters=sorted(self.adapters),
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
            for kind, content in self._files.items()
        ]


def _check_hello(message: engine_pb2.ConnectRequest) -> None:
    kind = message.WhichOneof("message")
    expect(kind == "hello", "hello as the first message of a stream", kind)
    hello = message.hello
    for violation in _HELLO_RULES.violations(hello, {}):
        fail("a hello that keeps the rules of the contract", violation.message)
    expect(hello.frontend_epoch != 0, "a frontend_epoch other than 0", 0)
    expect(hello.schema_revision >= 1, "a schema_revision from 1", hello.schema_revision)


def _tokenizer() -> bytes:
    vocabulary = {f"w{number}": number for number in range(VOCAB_SIZE)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    content: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    return json.dumps(content).encode()
