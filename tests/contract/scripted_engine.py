"""A second engine; its tokens are hashes. Written from `protos/engine-session.md` with stubs and gRPC alone.

It has the features `resume` and `input_segments`. What an engine of `wrong_engines.py` does otherwise is a
method of its own here.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import struct
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from benchmarks.rig.processes import LOOPBACK
from triptych.common.v1 import error_pb2, output_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2, utility_pb2
from triptych.options.v1 import rules_pb2
from triptych_kit.addresses import join_address

REVISION = 1
VOCAB_SIZE = 1000
EOS_TOKEN_ID = VOCAB_SIZE - 1
MAX_MODEL_LEN = 2048
MAX_INFLIGHT_ADDS = 64
_MAX_KEPT_BYTES = 8 * 1024 * 1024
_MAX_UNSENT = 8192
_MAX_UNACKNOWLEDGED_BEATS = 4
_MAX_ENDED = 8192
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_MAX_CHUNK_BYTES = 1024 * 1024

_SERVED = {
    "handle", "request_id", "prompt_token_ids", "output_token_ids", "sampling", "request_seed", "attempt",
    "group_id", "group_index", "age_ms", "remaining_ms", "priority", "cache_salt", "tenant",
    "orphan_grace_ms", "resume_state", "trace_context", "skip_reading_prefix_cache", "resumable", "segment",
}  # fmt: skip
_HINTS = {
    "external_request_id", "data_parallel_rank", "job_id", "is_last_step", "tool_name",
}  # fmt: skip
_SERVED_SAMPLING = {"temperature", "max_tokens", "ignore_eos", "stop_token_ids", "seed", "max_draft_tokens"}
# These are served where they change nothing: a hash has no distribution.
_NEUTRAL = {
    "n": 1, "top_p": 1, "top_k": 0, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0,
    "repetition_penalty": 1, "min_tokens": 0,
}  # fmt: skip

_FEATURES = ("resume", "input_segments")

_Code = grpc.StatusCode
READY = session_pb2.Ready(
    model_name="scripted",
    fingerprint=session_pb2.Fingerprint(digest="0" * 64, vocab_size=VOCAB_SIZE),
    max_model_len=MAX_MODEL_LEN,
    max_num_seqs=MAX_INFLIGHT_ADDS,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=[EOS_TOKEN_ID],
    supported_tasks=["generate"],
)


class Ended(Exception):
    """A session's end other than OK, or the refusal of a request."""

    def __init__(self, code: grpc.StatusCode, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    def status(self) -> status_pb2.Status:
        info = any_pb2.Any()
        info.Pack(error_details_pb2.ErrorInfo(reason=self.reason, domain="triptych"))
        return status_pb2.Status(code=self.code.value[0], message=self.message, details=[info])


@dataclass
class Running:
    """A request in flight. tokens: what is known of it, the output of its present turn at the end."""

    entry: add_pb2.AddEntry  # that began the turn
    prompt: tuple[int, ...]
    num_tokens: int  # of the output of the turn so far
    max_tokens: int
    deadline_at: float | None
    tokens: list[int]
    has_begun: bool = False
    is_aborted: bool = False
    is_open: bool = False  # for further input
    is_idle: bool = False  # its turn has ended
    is_cancelled: bool = False  # its turn
    refusal: Ended | None = None  # of its last segment

    @property
    def name(self) -> tuple[str, int]:
        return self.entry.request_id, self.entry.attempt


@dataclass(eq=False)
class Link:
    """A stream that carries a session. sent: the last message that was sent over it."""

    sent: int
    is_closed: bool = False


class Session:
    """What a frontend has here, over as many streams as it takes."""

    def __init__(self, hello: session_pb2.Hello, features: Iterable[str], *, max_kept_bytes: int) -> None:
        self.hello = hello
        self.max_kept_bytes = max_kept_bytes
        self.is_resumable = "resume" in features
        self.takes_segments = "input_segments" in features
        self.running: dict[int, Running] = {}
        self.ended: dict[int, tuple[str, int]] = {}  # oldest first
        self.link: Link | None = None
        self.is_over = False
        self.error: Ended | None = None
        self.changed = asyncio.Event()
        self.last_seq = 0
        self._kept: dict[int, bytes] = {}
        self._num_kept_bytes = 0
        self._num_unacknowledged_beats = 0

    def send(self, **content: Any) -> None:
        if self.is_over:
            return
        self.last_seq += 1
        message = engine_pb2.ConnectResponse(seq=self.last_seq, **content)
        if "heartbeat" in content:
            message.heartbeat.last_seq = self.last_seq - 1
        self._kept[self.last_seq] = message.SerializeToString()
        self._num_kept_bytes += len(self._kept[self.last_seq])
        self.check_unsent()
        self.changed.set()

    @property
    def is_full(self) -> bool:
        """Whether steps wait for acknowledgements."""
        return self._num_kept_bytes > self.max_kept_bytes

    def check_unsent(self) -> None:
        if self.link is not None and self.last_seq - self.link.sent > _MAX_UNSENT:
            self.end(Ended(_Code.RESOURCE_EXHAUSTED, "SLOW_READER", "messages are not read"))

    def on_beat(self) -> None:
        """End a session whose messages are not acknowledged."""
        self._num_unacknowledged_beats = self._num_unacknowledged_beats + 1 if self.is_full else 0
        if self._num_unacknowledged_beats > _MAX_UNACKNOWLEDGED_BEATS:
            self.end(Ended(_Code.RESOURCE_EXHAUSTED, "SLOW_READER", "messages are not acknowledged"))

    def next_message(self, link: Link) -> bytes | None:
        if link.sent >= self.last_seq:
            return None
        link.sent += 1
        return self._kept[link.sent]

    def acknowledge(self, last_seq: int) -> None:
        for seq in [seq for seq in self._kept if seq <= last_seq]:
            self._num_kept_bytes -= len(self._kept.pop(seq))

    def has_all_after(self, last_seq: int) -> bool:
        return last_seq <= self.last_seq and all(
            seq in self._kept for seq in range(last_seq + 1, self.last_seq + 1)
        )

    @property
    def has_rows(self) -> bool:
        return not all(running.is_idle for running in self.running.values())

    def knows(self, handle: int, name: tuple[str, int]) -> bool:
        running = self.running.get(handle)
        return name == (running.name if running else self.ended.get(handle))

    def settle(self, handle: int, name: tuple[str, int]) -> None:
        self.ended.pop(handle, None)
        self.ended[handle] = name
        if len(self.ended) > _MAX_ENDED:
            del self.ended[next(iter(self.ended))]

    def end(self, error: Ended | None = None) -> None:
        if not self.is_over:
            self.is_over, self.error = True, error
            self.running.clear()
        self.changed.set()


class ScriptedEngine(engine_pb2_grpc.EngineCoreServiceServicer):
    """Serves sessions from `start` to `stop`.

    ready: what it announces.  files: the content of the artifacts of `ready`, by their digests.
    """

    session_type: type[Session] = Session
    heartbeat_s = 0.5
    step_s = 0.002
    load_s = 0.5
    max_taken_bytes = _MAX_MESSAGE_BYTES

    def __init__(
        self,
        *,
        ready: session_pb2.Ready = READY,
        files: Mapping[str, bytes] | None = None,
        hello_limit_s: float = 10.0,
        replay_window_s: float = 5.0,
        max_kept_bytes: int = _MAX_KEPT_BYTES,
    ) -> None:
        self.ready = ready
        self.epoch = secrets.randbits(63) | 1
        self.is_loading = False
        self.sessions: list[Session] = []
        self.accepted: list[add_pb2.AddEntry] = []
        self.step_number = 0
        self.is_draining = False
        self._files = files or {}
        self._hello_limit_s = hello_limit_s
        self._replay_window_s = replay_window_s
        self._max_kept_bytes = max_kept_bytes

    async def start(self, port: int = 0) -> str:
        options = [("grpc.max_receive_message_length", self.max_taken_bytes), ("grpc.so_reuseport", 0)]
        # A frontend pings every 0.5 s.
        options += [("grpc.http2.min_ping_interval_without_data_ms", 400), ("grpc.http2.max_ping_strikes", 0)]
        self._server = grpc.aio.server(options=options)
        connect = grpc.stream_stream_rpc_method_handler(
            self.Connect, request_deserializer=engine_pb2.ConnectRequest.FromString, response_serializer=None
        )
        name = engine_pb2.DESCRIPTOR.services_by_name["EngineCoreService"].full_name
        handlers = grpc.method_handlers_generic_handler(name, {"Connect": connect})
        # It takes precedence over the same method below, whose messages are not serialized yet.
        self._server.add_generic_rpc_handlers((handlers,))
        engine_pb2_grpc.add_EngineCoreServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port(join_address(LOOPBACK, port))
        await self._server.start()
        self._tasks = [asyncio.create_task(self._step_forever()), asyncio.create_task(self._beat_forever())]
        return join_address(LOOPBACK, self._port)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._server.stop(0)

    @property
    def num_running(self) -> int:
        return sum(len(session.running) for session in self.sessions)

    @property
    def _state(self) -> session_pb2.EngineState:
        if self.is_loading:
            return session_pb2.ENGINE_STATE_LOADING
        return session_pb2.ENGINE_STATE_DRAINING if self.is_draining else session_pb2.ENGINE_STATE_READY

    async def restart(self) -> None:
        """Be another process at the same address, which loads from its first session on."""
        await self.stop()
        self.sessions.clear()
        self.epoch = self.another_epoch()
        self.is_loading = True
        await self.start(self._port)

    def another_epoch(self) -> int:
        return self.epoch + 1

    def _end_loading(self, epoch: int) -> None:
        if self.is_loading and epoch == self.epoch:
            self.is_loading = False
            for session in self.sessions:
                session.send(ready=self.ready)

    async def drain(self) -> None:
        self.is_draining = True
        for session in self.sessions:
            for running in session.running.values():
                self.end_input(running)
            session.send(draining=engine_pb2.Draining(deadline_ms=5000))

    async def GetArtifacts(
        self, request: engine_pb2.GetArtifactsRequest, context: Any
    ) -> AsyncIterator[engine_pb2.GetArtifactsResponse]:
        for artifact in self.ready.artifacts:
            is_asked = not request.kinds or artifact.kind in request.kinds
            if not is_asked or artifact.sha256 in request.known_sha256:
                continue
            content = self._files[artifact.sha256]
            for offset in range(0, len(content), _MAX_CHUNK_BYTES):
                chunk = content[offset : offset + _MAX_CHUNK_BYTES]
                yield engine_pb2.GetArtifactsResponse(artifact=artifact, offset=offset, chunk=chunk)

    async def Connect(self, requests: AsyncIterator[engine_pb2.ConnectRequest], context: Any) -> None:
        try:
            await self._serve(requests, context)
        except Ended as end:
            await context.abort_with_status(rpc_status.to_status(end.status()))

    async def _serve(self, requests: AsyncIterator[engine_pb2.ConnectRequest], context: Any) -> None:
        hello = await self._read_hello(requests)
        self.check_hello(hello)
        found = self.resumed_by(hello)
        resumed = found if isinstance(found, Session) else None
        self.end_older(hello, resumed)
        features = self.common_features(hello)
        session = resumed or self.session_type(hello, features, max_kept_bytes=self._max_kept_bytes)
        if resumed is None:
            self.sessions.append(session)
            if not self.is_loading:
                session.send(ready=self.ready)
            elif len(self.sessions) == 1:
                asyncio.get_running_loop().call_later(self.load_s, self._end_loading, self.epoch)
        # Taking a link from another stream ends that stream.
        session.link = link = Link(hello.resume.last_seq if resumed else 0)
        session.acknowledge(link.sent)
        session.changed.set()
        ack = self.hello_ack(features, is_resumable=session.is_resumable)
        ack.resume_ok = resumed is not None
        if not isinstance(found, Session):
            ack.resume_refusal = found
        await context.write(engine_pb2.ConnectResponse(hello_ack=ack).SerializeToString())
        reader = asyncio.create_task(self._read(session, link, requests))
        try:
            await self._write(session, link, context)
        finally:
            reader.cancel()
            self._detach(session, link)

    async def _read_hello(self, requests: AsyncIterator[engine_pb2.ConnectRequest]) -> session_pb2.Hello:
        try:
            async with asyncio.timeout(self._hello_limit_s):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise Ended(_Code.DEADLINE_EXCEEDED, "NO_HELLO", "no hello in time") from None
        if first is None or not first.HasField("hello"):
            raise Ended(_Code.FAILED_PRECONDITION, "NO_HELLO", "the first message is not hello")
        return first.hello

    def check_hello(self, hello: session_pb2.Hello) -> None:
        for name in broken_fields(hello, self.ready.vocab_size):
            raise Ended(_Code.INVALID_ARGUMENT, "BAD_ID", f"{name} breaks a rule of the contract")
        if hello.min_peer_revision > REVISION or hello.schema_revision < REVISION:
            raise Ended(_Code.FAILED_PRECONDITION, "REVISION_TOO_OLD", f"the revision here is {REVISION}")

    def common_features(self, hello: session_pb2.Hello) -> list[str]:
        return [name for name in _FEATURES if name in hello.features or getattr(hello.feature_set, name)]

    def resumed_by(self, hello: session_pb2.Hello) -> Session | session_pb2.ResumeRefusal:
        """The session that goes on, or why none does."""
        if not hello.HasField("resume"):
            return session_pb2.RESUME_REFUSAL_UNSPECIFIED
        if not self.is_own_epoch(hello.resume.engine_epoch):
            return session_pb2.RESUME_REFUSAL_OTHER_EPOCH
        last_seq = hello.resume.last_seq
        for session in self.sessions:
            if session.is_resumable and not session.is_over and self.is_same_session(session.hello, hello):
                if session.has_all_after(last_seq):
                    return session
                is_sent = last_seq <= session.last_seq
                return (
                    session_pb2.RESUME_REFUSAL_NOT_KEPT if is_sent else session_pb2.RESUME_REFUSAL_NEVER_SENT
                )
        return session_pb2.RESUME_REFUSAL_NO_SESSION

    def is_own_epoch(self, engine_epoch: int) -> bool:
        return engine_epoch == self.epoch

    def is_same_session(self, one: session_pb2.Hello, other: session_pb2.Hello) -> bool:
        names = ("frontend_id", "session_id", "frontend_epoch")
        return all(getattr(one, name) == getattr(other, name) for name in names)

    def end_older(self, hello: session_pb2.Hello, resumed: Session | None) -> None:
        for session in list(self.sessions):
            is_replaced = session.link is None or session.hello.session_id == hello.session_id
            is_older = session.hello.frontend_epoch != hello.frontend_epoch
            is_same_frontend = session.hello.frontend_id == hello.frontend_id
            if session is not resumed and is_same_frontend and (is_older or is_replaced):
                session.end(Ended(_Code.ABORTED, "SUPERSEDED", "a newer session has begun"))
                self.sessions.remove(session)

    def hello_ack(self, features: list[str], *, is_resumable: bool) -> session_pb2.HelloAck:
        return session_pb2.HelloAck(
            engine_id="scripted",
            engine_epoch=self.epoch,
            dp_size=1,
            features=features,
            feature_set=session_pb2.FeatureSet(**dict.fromkeys(set(features) & set(_FEATURES), True)),
            state=self._state,
            ack_interval_messages=16,
            ack_interval_ms=50,
            replay_window_ms=int(self._replay_window_s * 1000) if is_resumable else 0,
            replay_window_bytes=self._max_kept_bytes if is_resumable else 0,
            max_frame_bytes=_MAX_MESSAGE_BYTES,
            max_inflight_adds=MAX_INFLIGHT_ADDS,
            schema_revision=REVISION,
            min_peer_revision=REVISION,
        )

    async def _write(self, session: Session, link: Link, context: Any) -> None:
        while True:
            session.changed.clear()
            while session.link is link and (message := session.next_message(link)) is not None:
                await context.write(message)
            if session.link is not link:
                raise Ended(_Code.ABORTED, "SUPERSEDED", "the session has another stream")
            if session.is_over and session.error is not None:
                raise session.error
            if session.is_over:
                return
            if link.is_closed:
                raise Ended(_Code.ABORTED, "NO_GOODBYE", "closed without goodbye")
            await session.changed.wait()

    async def _read(
        self, session: Session, link: Link, requests: AsyncIterator[engine_pb2.ConnectRequest]
    ) -> None:
        async for message in requests:
            if session.link is link and not session.is_over:
                self.take(session, message)
        link.is_closed = True
        session.changed.set()

    def _detach(self, session: Session, link: Link) -> None:
        if session.link is not link:
            return
        session.link = None
        if session.is_resumable and not session.is_over:
            asyncio.get_running_loop().call_later(self._replay_window_s, self._end_unattended, session)
        else:
            self._remove(session)

    def _end_unattended(self, session: Session) -> None:
        if session.link is None:
            self._remove(session)

    def _remove(self, session: Session) -> None:
        session.end()
        if session in self.sessions:
            self.sessions.remove(session)

    def take(self, session: Session, message: engine_pb2.ConnectRequest) -> None:
        match message.WhichOneof("message"):
            case "hello":
                self.on_second_hello(session)
            case "add":
                for entry in message.add.entries:
                    self.add(session, entry)
            case "abort":
                self.abort(session, message.abort)
            case "cancel_turn":
                self.cancel_turn(session, message.cancel_turn)
            case "ack":
                session.acknowledge(message.ack.last_seq)
            case "utility":
                failure = error_pb2.ErrorStatus(code=_Code.UNIMPLEMENTED.value[0], message="not served")
                result = utility_pb2.UtilityResult(call_id=message.utility.call_id, failure=failure)
                session.send(utility_result=result)
            case "goodbye":
                self.on_goodbye(session)
            case "finish_hint":
                pass  # No blocks are kept for a job.
            case None:
                self.on_unknown(session)

    def on_second_hello(self, session: Session) -> None:
        session.end(Ended(_Code.INVALID_ARGUMENT, "SECOND_HELLO", "hello comes once"))

    def on_goodbye(self, session: Session) -> None:
        session.end()

    def on_unknown(self, session: Session) -> None:
        """Ignores it."""

    def add(self, session: Session, entry: add_pb2.AddEntry) -> None:
        if entry.segment:
            self.extend(session, entry)
            return
        name = (entry.request_id, entry.attempt)
        if session.knows(entry.handle, name):
            self.on_known_add(session, entry)
            return
        try:
            self.check(session, entry)
        except Ended as refusal:
            self.reject(session, entry, refusal)
            return
        tokens = unpack(entry.prompt_token_ids) + unpack(entry.output_token_ids)
        session.running[entry.handle] = self.begin(entry, tokens)
        self.accepted.append(entry)

    def begin(self, entry: add_pb2.AddEntry, tokens: tuple[int, ...]) -> Running:
        """A turn whose prompt and output so far are these tokens."""
        num_tokens = len(unpack(entry.output_token_ids))
        prompt = tokens[: len(tokens) - num_tokens]
        limit = self.ready.max_model_len - len(prompt)
        max_tokens = min(entry.sampling.max_tokens, limit) if entry.sampling.HasField("max_tokens") else limit
        remaining_s = entry.remaining_ms / 1000 if entry.HasField("remaining_ms") else None
        deadline_at = None if remaining_s is None else time.monotonic() + remaining_s
        return Running(entry, prompt, num_tokens, max_tokens, deadline_at, [*tokens], is_open=entry.resumable)

    def extend(self, session: Session, entry: add_pb2.AddEntry) -> None:
        """Begin the next turn of a request, or let it end."""
        if not session.knows(entry.handle, (entry.request_id, entry.attempt)):
            unknown = Ended(_Code.NOT_FOUND, "NO_SUCH_REQUEST", f"handle {entry.handle} has no such request")
            self.reject(session, entry, unknown)
            return
        running = session.running.get(entry.handle)
        if running is None or not running.is_open or self.is_known_segment(running, entry):
            return
        if not entry.resumable:
            self.end_input(running)
            return
        try:
            self.check_segment(running, entry)
            tokens = self.context_of(running) + unpack(entry.prompt_token_ids)
            self.check_tokens(entry, tokens)
        except Ended as refusal:
            running.refusal, running.is_idle, running.is_open = refusal, False, False
            return
        session.running[entry.handle] = self.begin(entry, tokens)
        self.accepted.append(entry)

    def context_of(self, running: Running) -> tuple[int, ...]:
        """The token sampled last is the frontend's to send."""
        return tuple(running.tokens[:-1])

    def end_input(self, running: Running) -> None:
        """A request ends with its turn, or at once between two."""
        running.is_open = False
        running.is_aborted |= running.is_idle
        running.is_idle = False

    def is_known_segment(self, running: Running, entry: add_pb2.AddEntry) -> bool:
        return entry.segment <= running.entry.segment

    def check_segment(self, running: Running, entry: add_pb2.AddEntry) -> None:
        if entry.segment != running.entry.segment + 1:
            raise Ended(_Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "segment: not the next one")
        if not running.is_idle:
            raise Ended(_Code.FAILED_PRECONDITION, "TURN_NOT_ENDED", "the turn before has not ended")
        self.check_fields(entry)
        self.check_values(entry)
        if entry.output_token_ids:
            raise Ended(_Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "output_token_ids: not in a segment")

    def cancel_turn(self, session: Session, cancel: engine_pb2.CancelTurn) -> None:
        running = session.running.get(cancel.handle)
        if running is not None and running.is_open and self.is_present_turn(running, cancel):
            running.is_cancelled = True

    def is_present_turn(self, running: Running, cancel: engine_pb2.CancelTurn) -> bool:
        return running.entry.segment == cancel.segment and not running.is_idle

    def on_known_add(self, session: Session, entry: add_pb2.AddEntry) -> None:
        """Ignores it: the frontend cannot know what arrived before its stream broke."""

    def check(self, session: Session, entry: add_pb2.AddEntry) -> None:
        """Raise Ended for an entry that is not accepted."""
        self.check_state()
        self.check_handle(session, entry)
        self.check_request_id(session, entry)
        self.check_limit(session)
        self.check_fields(entry)
        self.check_values(entry)
        self.check_resumable(session, entry)
        self.check_tokens(entry, unpack(entry.prompt_token_ids) + unpack(entry.output_token_ids))

    def check_tokens(self, entry: add_pb2.AddEntry, tokens: tuple[int, ...]) -> None:
        """tokens: the context that it begins with."""
        if (
            not entry.prompt_token_ids
            or len(tokens) >= self.ready.max_model_len
            or max(tokens) >= self.ready.vocab_size
        ):
            raise Ended(_Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "prompt_token_ids: not of this model")

    def check_resumable(self, session: Session, entry: add_pb2.AddEntry) -> None:
        if entry.resumable and not session.takes_segments:
            raise Ended(_Code.UNIMPLEMENTED, "UNIMPLEMENTED_FIELD", "resumable is not served in this session")

    def check_state(self) -> None:
        if self.is_loading:
            raise Ended(_Code.UNAVAILABLE, "ENGINE_LOADING", "the model is not loaded")
        if self.is_draining:
            raise Ended(_Code.UNAVAILABLE, "ENGINE_DRAINING", "the engine drains")

    def check_handle(self, session: Session, entry: add_pb2.AddEntry) -> None:
        if entry.handle in session.running:
            raise Ended(_Code.ALREADY_EXISTS, "HANDLE_IN_USE", f"handle {entry.handle} is in flight")

    def check_request_id(self, session: Session, entry: add_pb2.AddEntry) -> None:
        names = [running.name for running in session.running.values() if not running.is_aborted]
        if (entry.request_id, entry.attempt) in names:
            raise Ended(_Code.ALREADY_EXISTS, "REQUEST_ID_IN_USE", f"{entry.request_id} is in flight")

    def check_limit(self, session: Session) -> None:
        if len(session.running) >= MAX_INFLIGHT_ADDS:
            raise Ended(_Code.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED", "too many requests are in flight")

    def check_fields(self, entry: add_pb2.AddEntry) -> None:
        self.check_params(entry)
        for field, _ in entry.ListFields():
            if field.name not in _SERVED | _HINTS:
                raise Ended(_Code.UNIMPLEMENTED, "UNIMPLEMENTED_FIELD", f"{field.name} is not served")
        for field, value in entry.sampling.ListFields():
            if field.name not in _SERVED_SAMPLING and not self.is_neutral(field.name, value):
                raise Ended(_Code.UNIMPLEMENTED, "UNIMPLEMENTED_FIELD", f"{field.name} is not served")

    def check_values(self, entry: add_pb2.AddEntry) -> None:
        for name in broken_fields(entry, self.ready.vocab_size):
            raise Ended(_Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", f"{name} breaks a rule of the contract")

    def is_neutral(self, name: str, value: object) -> bool:
        return _NEUTRAL.get(name) == value

    def check_params(self, entry: add_pb2.AddEntry) -> None:
        if entry.WhichOneof("params") != "sampling":
            raise Ended(_Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "neither sampling nor pooling is served")

    def reject(self, session: Session, entry: add_pb2.AddEntry, refusal: Ended) -> None:
        if entry.handle not in session.running:
            session.settle(entry.handle, (entry.request_id, entry.attempt))
        code, details = refusal.code.value[0], refusal.status().SerializeToString()
        status = error_pb2.ErrorStatus(code=code, message=refusal.message, details=details)
        rejected = engine_pb2.AddRejected(handle=entry.handle, attempt=entry.attempt, status=status)
        session.send(add_rejected=rejected)

    def abort(self, session: Session, abort: engine_pb2.Abort) -> None:
        late = []
        attempts: list[int | None] = [*abort.attempts] or [None] * len(abort.handles)
        for handle, attempt in zip(abort.handles, attempts, strict=True):
            running = session.running.get(handle)
            if running is not None and attempt in (None, running.entry.attempt):
                running.is_aborted, running.is_idle = True, False
            elif running is None and handle in session.ended:
                late.append(handle)
        if late:
            session.send(already_finished=engine_pb2.AlreadyFinished(handles=late))

    def step(self, session: Session) -> step_pb2.Step:
        """One more token for each request in flight, or its end."""
        step = step_pb2.Step(step_number=self.step_number)
        handles = [handle for handle, running in session.running.items() if not running.is_idle]
        counts, tokens = [], []
        for row, handle in enumerate(handles):
            running = session.running[handle]
            is_late = running.deadline_at is not None and time.monotonic() >= running.deadline_at
            if running.refusal is not None:
                counts.append(0)
                code, message = running.refusal.code.value[0], running.refusal.message
                step.finished.add(row=row, reason=output_pb2.FINISH_REASON_ERROR, code=code, message=message)
                continue
            if running.is_aborted or is_late or running.num_tokens >= running.max_tokens:
                counts.append(0)
                is_cut = running.is_aborted or is_late
                reason = output_pb2.FINISH_REASON_ABORT if is_cut else output_pb2.FINISH_REASON_LENGTH
                step.finished.add(row=row, reason=reason)
                continue
            if not running.has_begun:
                step.first.add(row=row, num_cached_tokens=0)
                running.has_begun = True
            tokens.append(self.token(running))
            running.tokens.append(tokens[-1])
            running.num_tokens += 1
            counts.append(1)
            end = {"row": row, "turn_ended": running.is_open}
            if tokens[-1] in running.entry.sampling.stop_token_ids:
                step.finished.add(reason=output_pb2.FINISH_REASON_STOP, stop_token_id=tokens[-1], **end)
            elif running.num_tokens >= running.max_tokens:
                step.finished.add(reason=output_pb2.FINISH_REASON_LENGTH, **end)
            elif running.is_cancelled:
                step.finished.add(reason=output_pb2.FINISH_REASON_ABORT, **end)
        step.handles, step.num_tokens, step.token_ids = pack(handles), bytes(counts), pack(tokens)
        for finished in step.finished:
            handle = handles[finished.row]
            if finished.turn_ended:
                session.running[handle].is_idle = True
            else:
                session.settle(handle, session.running.pop(handle).name)
        return step

    def token(self, running: Running) -> int:
        """The next token, from the seed and the position alone."""
        return token_at(running.prompt, running.entry.request_seed, running.num_tokens)

    async def _step_forever(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            self.step_number += 1
            for session in list(self.sessions):
                if session.has_rows and not session.is_full:
                    session.send(step=self.step(session))
                if self.is_draining and not session.running:
                    session.end()

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(self.heartbeat_s)
            for session in self.sessions:
                if session.link is not None:
                    has_work = session.has_rows
                    number, state = self.step_number, self._state
                    beat = session_pb2.Heartbeat(step_number=number, has_work=has_work, state=state)
                    session.send(heartbeat=beat)
                    session.on_beat()


def token_at(prompt: Sequence[int], seed: int, position: int) -> int:
    """The token at a position of the output."""
    return zlib.crc32(repr((tuple(prompt), seed, position)).encode()) % EOS_TOKEN_ID


def broken_fields(message: Any, vocab_size: int) -> Iterator[str]:
    """The fields with values outside their rules. Columns of ids are checked where they are unpacked."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            continue
        if field.message_type is None:
            if breaks(field.GetOptions().Extensions[rules_pb2.rules], value, vocab_size):
                yield field.name
        elif not field.is_repeated:
            yield from broken_fields(value, vocab_size)


def breaks(rules: rules_pb2.Rules, value: Any, vocab_size: int) -> bool:
    """Whether a value breaks one of the rules that fields of this engine have."""

    def limit(name: str, default: float) -> float:
        return getattr(rules, name) if rules.HasField(name) else default

    match value:
        case str():
            is_long = not rules.min_chars <= len(value) <= limit("max_chars", math.inf)
            return is_long or (rules.printable and not value.isprintable())
        case bytes():
            return len(value) > limit("max_bytes", math.inf)
        case int() | float():
            return not limit("minimum", -math.inf) <= value <= limit("maximum", math.inf)
    is_foreign = rules.in_vocabulary and max(value, default=0) >= vocab_size
    return is_foreign or len(value) > limit("max_items", math.inf)


def pack(values: Iterable[int]) -> bytes:
    """A column of u32."""
    numbers = list(values)
    return struct.pack(f"<{len(numbers)}I", *numbers)


def unpack(column: bytes) -> tuple[int, ...]:
    """The values of a column of u32. Raises Ended for another length."""
    if len(column) % 4:
        raise Ended(_Code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "token ids are a column of u32")
    return struct.unpack(f"<{len(column) // 4}I", column)
