"""A second frontend, of token ids alone: written from `protos/engine-session.md` with stubs and gRPC alone.

It has the features `resume` and `input_segments`, and of `adopt` what lets other frontends continue its
requests. What one of `wrong_frontends.py` does otherwise is a method of its own here.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import secrets
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from benchmarks.rig.processes import LOOPBACK
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc
from triptych.common.v1 import output_pb2, sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, engine_pb2_grpc, session_pb2, step_pb2
from triptych_kit.addresses import join_address

REVISION = 1
_FEATURES = ("resume", "adopt", "input_segments")
_SILENCE_S = 1.5
_RESUME_ATTEMPT_S = 0.5
_RETRY_S = 0.05
_MAX_INLINE_BYTES = 256 * 1024
_CHUNK_BYTES = 1024 * 1024
_RECONNECT_LIMIT_S = 10.0
_FINAL_REJECTIONS = (grpc.StatusCode.INVALID_ARGUMENT.value[0], grpc.StatusCode.UNIMPLEMENTED.value[0])
_GOODBYE_LIMIT_S = 1.0
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 500),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
]


class Void(Exception):
    """The engine has broken the contract, or its session cannot be continued."""


class Incompatible(Exception):
    """The revisions of the two sides do not work together."""


@dataclass(eq=False)
class Request:
    """One output of a client's request, or a turn of a session. events: tokens, then a reason or a status."""

    prompt: Sequence[int]
    sampling: sampling_pb2.SamplingParams
    seed: int
    remaining_ms: int | None
    orphan_grace_ms: int = 0
    embeds: tensor_pb2.Tensor | None = None
    is_token: bytes = b""
    adapter: str = ""
    job_id: str = ""
    is_last_step: bool = False
    adapter_digest: str = ""  # once it is sent
    request_id: str = field(default_factory=lambda: secrets.token_hex(16))
    attempt: int = 0
    output: list[int] = field(default_factory=list)
    digest: str = ""  # of the model that made the output
    has_begun: bool = False  # at the engine that has it now
    is_aborted: bool = False
    is_by_token: bool = False  # whether the last token has ended it
    is_resumable: bool = False
    segment: int = 0  # of a request that has it as a further turn
    num_kept: int = 0  # tokens of the prompt that the engine has, then
    link: EngineLink | None = None  # the engine that it was sent to last, and
    handle: int = 0  # its handle there
    events: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def entry(self, handle: int, *, others_may_adopt: bool) -> add_pb2.AddEntry:
        entry = add_pb2.AddEntry(
            handle=handle,
            request_id=self.request_id,
            attempt=self.attempt,
            segment=self.segment,
            prompt_token_ids=pack(self.prompt[self.num_kept :]),
            output_token_ids=pack(self.output),
            sampling=self.sampling,
            request_seed=self.seed,
            remaining_ms=self.remaining_ms,
            prompt_embeds=self.embeds,
            is_token=self.is_token,
            adapter=self.adapter,
            adapter_digest=self.adapter_digest,
            job_id=self.job_id,
            is_last_step=self.is_last_step,
        )
        if others_may_adopt and self.orphan_grace_ms:
            entry.orphan_grace_ms, entry.resume_state = self.orphan_grace_ms, b"scripted"
        return entry


class EngineLink:
    """The frontend's side of one engine: its session, and the requests that were sent to it."""

    incompatible_retry_s = 5.0
    resume_limit_s: float | None = 1.0

    def __init__(self, frontend: ScriptedFrontend, address: str) -> None:
        self.requests: dict[int, Request] = {}
        self.idle: dict[int, Request] = {}  # turns that have ended, of requests that wait for the next
        self.is_open = False  # there is a stream
        self.is_ready = False  # the engine takes requests
        self.digest = ""
        self.adapters: dict[str, str] = {}  # digests by name
        self.last_seq = 0
        self.is_closing = False  # no session follows
        self._frontend = frontend
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = engine_pb2_grpc.EngineCoreServiceStub(self._channel)
        self._handles = itertools.count(1)
        self._outgoing: asyncio.Queue[engine_pb2.ConnectRequest] = asyncio.Queue()
        self._hung_at: int | None = None  # step number
        self._ack = session_pb2.HelloAck()
        self._session_id = ""
        self._uploads: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """One session after the other, until it is closed or cancelled."""
        try:
            while not self.is_closing:
                pause_s = _RETRY_S
                self._session_id = secrets.token_hex(16)
                try:
                    await self._run_session()
                except Incompatible:
                    pause_s = self.incompatible_retry_s
                except (Void, TimeoutError, grpc.RpcError, asyncio.InvalidStateError):
                    pass
                self._lose_requests()
                await asyncio.sleep(pause_s)
        finally:
            await self._channel.close(None)

    def add(self, request: Request) -> None:
        handle = next(self._handles)
        request.has_begun = False
        request.link, request.handle = self, handle
        self.requests[handle] = request
        if request.embeds is None or not self.is_uploaded(request.embeds):
            self._send_add(handle, request)
            return
        task = asyncio.create_task(self._upload_and_send(handle, request))
        self._uploads.add(task)
        task.add_done_callback(self._uploads.discard)

    def extend(self, before: Request, request: Request) -> None:
        """Send a turn as a segment of the request that has ended the turn before."""
        handle = before.handle
        del self.idle[handle]
        request.request_id, request.attempt = before.request_id, before.attempt
        request.segment, request.num_kept = self.segment_after(before), self.num_kept_of(before)
        request.link, request.handle = self, handle
        self.requests[handle] = request
        self._send_add(handle, request)

    def segment_after(self, before: Request) -> int:
        return before.segment + 1

    def num_kept_of(self, before: Request) -> int:
        """All but the last token, which the engine has not computed."""
        return len(before.prompt) + len(before.output) - 1

    def end_input(self, last: Request) -> None:
        """End a request that waits for a further turn."""
        if self.idle.pop(last.handle, None) is not None:
            end = add_pb2.AddEntry(handle=last.handle, request_id=last.request_id, attempt=last.attempt)
            end.segment = last.segment + 1
            self.send(add=add_pb2.Add(entries=[end]))

    def cancel_turn(self, request: Request) -> bool:
        """False where the engine ends whole requests alone."""
        if self.takes_segments():
            cancel = engine_pb2.CancelTurn(handle=request.handle, segment=request.segment)
            self.send(cancel_turn=cancel)
        return self.takes_segments()

    def takes_segments(self) -> bool:
        return "input_segments" in self._ack.features

    def others_may_adopt(self) -> bool:
        return "adopt" in self._ack.features

    def is_uploaded(self, tensor: tensor_pb2.Tensor) -> bool:
        return len(tensor.inline) > _MAX_INLINE_BYTES

    async def _upload_and_send(self, handle: int, request: Request) -> None:
        assert request.embeds is not None, "this is for requests with a tensor"
        await self.upload(request.embeds.inline)
        if self.requests.get(handle) is request:
            self._send_add(handle, request)

    async def upload(self, content: bytes) -> None:
        header = engine_pb2.UploadBlobHeader(
            sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content)
        )
        chunks = [content[first : first + _CHUNK_BYTES] for first in range(0, len(content), _CHUNK_BYTES)]
        parts = [engine_pb2.UploadBlobRequest(header=header)]
        parts += [engine_pb2.UploadBlobRequest(chunk=chunk) for chunk in chunks]
        with contextlib.suppress(grpc.RpcError):
            await self._stub.UploadBlob(iter(parts))

    def _send_add(self, handle: int, request: Request) -> None:
        entry = request.entry(handle, others_may_adopt=self.others_may_adopt())
        entry.resumable = request.is_resumable and self.takes_segments()
        if request.embeds is not None and self.is_uploaded(request.embeds):
            content = request.embeds.inline
            entry.prompt_embeds.blob.sha256 = hashlib.sha256(content).hexdigest()
            entry.prompt_embeds.blob.size = len(content)
        self.send(add=add_pb2.Add(entries=[entry]))

    def abort(self, request: Request, reason: engine_pb2.AbortReason) -> None:
        for handle, running in self.requests.items():
            if running is request:
                self.send(abort=engine_pb2.Abort(handles=[handle], reason=reason))
                if reason == engine_pb2.ABORT_REASON_STOP_STRING:
                    self._hint(handle, request)

    def _hint(self, handle: int, request: Request) -> None:
        """Calls are not parsed here: which tool follows is not known."""
        if request.job_id and not request.is_last_step:
            self.send(finish_hint=session_pb2.FinishHint(handle=handle))

    def send(self, **content: Any) -> None:
        self._outgoing.put_nowait(engine_pb2.ConnectRequest(**content))

    def close(self) -> None:
        """End the session: the engine ends the stream."""
        self.is_closing = True
        self.send(goodbye=engine_pb2.Goodbye(reason="stops"))

    async def _run_session(self) -> None:
        self.last_seq, self._hung_at = 0, None
        await self._run_stream(None)
        while self.can_resume():
            await self._resume()

    async def _resume(self) -> None:
        """Another stream of the session, to its end. Attempts are made one after the other."""
        async with asyncio.timeout(self.resume_limit_s) as limit:
            is_taken = False
            while not is_taken:
                point = session_pb2.ResumePoint(
                    engine_epoch=self._ack.engine_epoch, last_seq=self.resume_at()
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RESUME_ATTEMPT_S) as attempt:
                        await self._run_stream(point, (limit, attempt))
                is_taken = attempt.when() is None
                await asyncio.sleep(_RETRY_S)

    def can_resume(self) -> bool:
        return "resume" in self._ack.features

    def resume_at(self) -> int:
        return self.last_seq

    async def _run_stream(
        self, point: session_pb2.ResumePoint | None, limits: Sequence[asyncio.Timeout] = ()
    ) -> None:
        """Read one stream to its end. Raises unless its session may be resumed.

        limits: of the time until the engine has taken the stream.
        """
        call: Any = self._stub.Connect()
        self._outgoing = asyncio.Queue()
        writer: asyncio.Task[None] | None = None
        try:
            hello = session_pb2.Hello(
                frontend_id=self._frontend.frontend_id,
                session_id=self._session_id,
                frontend_epoch=self._frontend.epoch,
                schema_revision=REVISION,
                features=_FEATURES,
                feature_set=session_pb2.FeatureSet(**dict.fromkeys(_FEATURES, True)),
                resume=point,
            )
            await call.write(engine_pb2.ConnectRequest(hello=hello))
            message = await call.read()
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # its stubs leave it out
                raise Void
            self._ack = message.hello_ack
            if not self.is_compatible(self._ack):
                raise Incompatible
            if point is not None and not self._ack.resume_ok:
                raise Void
            for limit in limits:
                limit.reschedule(None)
            if point is not None:
                self.send_again()
            self.on_hello_ack(self._ack)
            self.is_open = True
            if self.is_ready:
                self._frontend.on_ready()
            writer = asyncio.create_task(self._write(call))
            await self._read(call)
        except (grpc.RpcError, asyncio.InvalidStateError):
            await self.check_broken(call)
        finally:
            self.is_open = False
            call.cancel()
            if writer is not None:
                writer.cancel()

    async def check_broken(self, call: Any) -> None:
        """Raise unless a failed call may have been cut, with a session that goes on."""
        code, details = await call.code(), await call.details() or ""
        has_reason = any(key == "grpc-status-details-bin" for key, _ in await call.trailing_metadata() or ())
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise Incompatible
        if has_reason or (code is grpc.StatusCode.UNAVAILABLE and "refused" in details.lower()):
            raise Void

    def is_compatible(self, ack: session_pb2.HelloAck) -> bool:
        return ack.min_peer_revision <= REVISION

    def on_hello_ack(self, ack: session_pb2.HelloAck) -> None:
        """A resumed session does not get ready again."""
        self.is_ready = self.is_ready and ack.resume_ok

    def send_again(self) -> None:
        for handle, request in self.requests.items():
            if not request.has_begun:
                self.send_add_again(handle, request)
            if request.is_aborted:
                self.send_abort_again(handle)

    def send_add_again(self, handle: int, request: Request) -> None:
        self._send_add(handle, request)

    def send_abort_again(self, handle: int) -> None:
        self.send(abort=engine_pb2.Abort(handles=[handle]))

    async def _write(self, call: Any) -> None:
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            while True:
                message = await self._outgoing.get()
                await call.write(message)
                if message.HasField("goodbye"):
                    await call.done_writing()

    async def _read(self, call: Any) -> None:
        while True:
            try:
                async with asyncio.timeout(_SILENCE_S):
                    message = await call.read()
            except TimeoutError:
                return
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # its stubs leave it out
                raise Void  # the engine leaves
            self.check_number(message.seq)
            self.last_seq = message.seq
            self._take(message)
            self.acknowledge()

    def check_number(self, seq: int) -> None:
        if seq != self.last_seq + 1:
            raise Void

    def acknowledge(self) -> None:
        self.send(ack=engine_pb2.Ack(last_seq=self.last_seq))

    def _take(self, message: engine_pb2.ConnectResponse) -> None:
        match message.WhichOneof("message"):
            case "ready":
                self.is_ready, self.digest = True, message.ready.fingerprint.digest
                self.adapters = {one.name: one.digest for one in message.ready.served_adapters}
                self._frontend.on_ready()
            case "step":
                self._take_step(message.step)
            case "add_rejected":
                request = self.requests.pop(message.add_rejected.handle, None)
                if request is not None and not request.is_aborted:
                    self._frontend.on_rejected(request, message.add_rejected, self)
            case "draining":
                self.on_draining()
            case "already_finished":
                for handle in message.already_finished.handles:
                    self.requests.pop(handle, None)
            case "dead":
                raise Void
            case "heartbeat":
                self.on_heartbeat(message.heartbeat)
            case None:
                self.on_unknown()

    def on_draining(self) -> None:
        self.is_ready = False

    def on_unknown(self) -> None:
        """Ignores it."""

    def on_heartbeat(self, heartbeat: session_pb2.Heartbeat) -> None:
        is_hung = heartbeat.has_work and heartbeat.step_started_age_ms > self.budget_ms(heartbeat)
        if is_hung and self._hung_at is None:
            self._hung_at, self.is_ready = heartbeat.step_number, False
            self.abort_moved(list(self.requests))
            self._lose_requests()
        elif self._hung_at is not None and heartbeat.step_number > self._hung_at:
            self._hung_at, self.is_ready = None, True

    def budget_ms(self, heartbeat: session_pb2.Heartbeat) -> int:
        return heartbeat.step_budget_ms or 5000

    def abort_moved(self, handles: Sequence[int]) -> None:
        """The engine may come back, and must not go on with what moves to another."""
        if handles:
            self.send(abort=engine_pb2.Abort(handles=handles, reason=engine_pb2.ABORT_REASON_MIGRATED))

    def check_columns(self, handles: Sequence[int], counts: Sequence[int], tokens: Sequence[int]) -> None:
        if len(counts) != len(handles) or sum(counts) != len(tokens):
            raise Void

    def _take_step(self, step: step_pb2.Step) -> None:
        handles, tokens = unpack(step.handles), unpack(step.token_ids)
        counts = unpack(step.num_tokens_wide) or list(step.num_tokens) or [0] * len(handles)
        self.check_columns(handles, counts, tokens)
        for first in step.first:
            if handles[first.row] in self.requests:
                self.requests[handles[first.row]].has_begun = True
        position = 0
        for handle, count in zip(handles, counts, strict=False):
            request = self.requests.get(handle)
            if request is not None and not request.is_aborted:
                self._frontend.on_tokens(request, tokens[position : position + count], self)
            position += count
        for finished in step.finished:
            self._take_end(handles[finished.row], finished)

    def _take_end(self, handle: int, finished: step_pb2.StepFinished) -> None:
        request = self.requests.pop(handle, None)
        if request is None:
            self.on_idle_end(handle)
        elif request.segment and not request.has_begun:
            self.on_gone(request, finished)
        elif not request.is_aborted:
            if finished.turn_ended:
                self.idle[handle] = request
            request.is_by_token = finished.WhichOneof("stop") is not None
            refused = _Refused.of(finished.code, finished.message) if finished.code else None
            request.events.put_nowait(refused or finished.reason)
            self._hint(handle, request)

    def on_idle_end(self, handle: int) -> None:
        """The engine keeps the request no longer."""
        self.idle.pop(handle, None)

    def on_gone(self, request: Request, finished: step_pb2.StepFinished) -> None:
        """The request had ended before the turn came: it begins another."""
        if not request.is_aborted:
            self._frontend.move(request, None)

    def _lose_requests(self) -> None:
        self.idle.clear()
        lost, self.requests = self.requests, {}
        for request in lost.values():
            if self.is_moved(request):
                self._frontend.move(request, self)

    def is_moved(self, request: Request) -> bool:
        return not request.is_aborted


class ScriptedFrontend(inference_pb2_grpc.InferenceServiceServicer):
    """Serves Generate and GenerateSession for token ids; the text of token 5 is `w5`."""

    link_type: type[EngineLink] = EngineLink

    def __init__(self, engines: Sequence[str]) -> None:
        self.frontend_id = f"scripted-{secrets.token_hex(4)}"
        self.epoch = secrets.randbits(63) | 1
        self._engines = engines
        self._waiting: list[Request] = []
        self._turn = 0

    async def start(self) -> str:
        self.links = [self.link_type(self, address) for address in self._engines]
        self._tasks = [asyncio.create_task(link.run()) for link in self.links]
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(join_address(LOOPBACK, 0))
        await self._server.start()
        return join_address(LOOPBACK, port)

    async def stop(self) -> None:
        await self._server.stop(0)
        for link in self.links:
            link.close()
        await asyncio.wait(self._tasks, timeout=_GOODBYE_LIMIT_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def Generate(
        self, request: generate_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generate_pb2.GenerateResponse]:
        remaining_s = context.time_remaining()
        requests = self.requests_of(request, None if remaining_s is None else int(remaining_s * 1000))
        try:
            if request.adapter and not any(request.adapter in link.adapters for link in self.links):
                raise _Refused(grpc.StatusCode.NOT_FOUND, f"no adapter {request.adapter}")
            for one in requests:
                self._send(one)
            position = 1
            yield generate_pb2.GenerateResponse(position=position, started=generate_pb2.Started())
            for index, one in enumerate(requests):
                async for event in self._events_of(one, request.sampling.stop):
                    position += 1
                    event.output_index = index
                    kind = "delta" if isinstance(event, generate_pb2.Delta) else "finished"
                    yield generate_pb2.GenerateResponse(position=position, **{kind: event})
        except _Refused as refusal:
            await context.abort(refusal.code, refusal.message)
        finally:
            for one in requests:
                self.on_client_gone(one)

    async def GenerateSession(
        self, messages: AsyncIterator[inference_pb2.GenerateSessionRequest], context: Any
    ) -> AsyncIterator[inference_pb2.GenerateSessionResponse]:
        start = (await anext(aiter(messages))).start
        remaining_s = context.time_remaining()
        (turn,) = self.requests_of(start, None if remaining_s is None else int(remaining_s * 1000))
        session, position = _Session(turn), 0

        def response(**content: Any) -> inference_pb2.GenerateSessionResponse:
            nonlocal position
            position += 1
            message = generate_pb2.GenerateResponse(position=position, **content)
            return inference_pb2.GenerateSessionResponse(
                response=message, turn_ended=message.HasField("finished")
            )

        reader = asyncio.create_task(self._read_session(session, messages))
        try:
            while True:
                self._send_turn(session)
                yield response(started=generate_pb2.Started())
                async for event in self._events_of(session.turn, start.sampling.stop):
                    yield response(
                        **{"delta" if isinstance(event, generate_pb2.Delta) else "finished": event}
                    )
                added = await session.inputs.get()
                if added is None:
                    break
                session.append(added)
            last = response(finished=generate_pb2.Finished(reason=output_pb2.FINISH_REASON_LENGTH))
            last.turn_ended = False
            yield last
        except _Refused as refusal:
            await context.abort(refusal.code, refusal.message)
        finally:
            reader.cancel()
            self.on_client_gone(session.turn)
            self.end_session(session)

    async def _read_session(
        self, session: _Session, messages: AsyncIterator[inference_pb2.GenerateSessionRequest]
    ) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "append":
                    session.inputs.put_nowait(list(message.append.token_ids.ids))
                case "end":
                    break
                case "cancel_turn":
                    self.cancel_turn(session.turn)
        session.inputs.put_nowait(None)

    def _send_turn(self, session: _Session) -> None:
        """Go on where the tokens before a turn are, or with all of them anywhere."""
        before, turn = session.before, session.turn
        link = None if before is None else before.link
        if before is not None and link is not None and link.idle.get(before.handle) is before:
            link.extend(before, turn)
        else:
            self._send(turn)

    def cancel_turn(self, turn: Request) -> None:
        if turn.link is None or not turn.link.cancel_turn(turn):
            self._abort(turn, engine_pb2.ABORT_REASON_CLIENT)
            turn.events.put_nowait(output_pb2.FINISH_REASON_ABORT)

    def end_session(self, session: _Session) -> None:
        if session.turn.link is not None:
            session.turn.link.end_input(session.turn)

    def requests_of(self, request: generate_pb2.GenerateRequest, remaining_ms: int | None) -> list[Request]:
        sampling = sampling_pb2.SamplingParams()
        sampling.CopyFrom(request.sampling)
        for name in ("n", "seed", "stop"):
            sampling.ClearField(name)
        first_seed = request.sampling.seed or secrets.randbits(62)
        prompt, embeds, is_token = list(request.token_ids.ids), None, b""
        if request.HasField("embeds"):
            is_token, embeds = request.embeds.is_token, rows_without_token(request.embeds)
            prompt = [
                token_id if flag else 0
                for token_id, flag in zip(request.embeds.token_ids, is_token, strict=True)
            ]
        grace_ms = request.orphan_grace_ms
        return [
            Request(
                prompt,
                sampling,
                first_seed + index,
                remaining_ms,
                grace_ms,
                embeds,
                is_token,
                request.adapter,
                request.job_id,
                request.is_last_step,
            )
            for index in range(max(1, request.sampling.n))
        ]

    def on_client_gone(self, request: Request) -> None:
        """Abort what has not ended."""
        if not request.is_aborted:
            self._abort(request, engine_pb2.ABORT_REASON_CLIENT)

    def _abort(self, request: Request, reason: engine_pb2.AbortReason) -> None:
        request.is_aborted = True
        for link in self.links:
            link.abort(request, reason)

    async def _events_of(
        self, request: Request, stops: Sequence[str]
    ) -> AsyncIterator[generate_pb2.Delta | generate_pb2.Finished]:
        text = ""
        while True:
            event = await request.events.get()
            if isinstance(event, _Refused):
                raise event
            if not isinstance(event, list):
                yield generate_pb2.Finished(reason=event)
                return
            for token_id in event:
                text += f"w{token_id} "
                if any(stop in text for stop in stops):
                    self._abort(request, engine_pb2.ABORT_REASON_STOP_STRING)
                    yield generate_pb2.Finished(reason=output_pb2.FINISH_REASON_STOP)
                    return
                yield generate_pb2.Delta(text=f"w{token_id} ", token_ids=[token_id])

    def on_tokens(self, request: Request, token_ids: list[int], link: EngineLink) -> None:
        request.output += token_ids
        request.digest = link.digest
        if token_ids:
            request.events.put_nowait(token_ids)

    def on_rejected(self, request: Request, rejected: engine_pb2.AddRejected, link: EngineLink) -> None:
        if rejected.status.code in _FINAL_REJECTIONS:
            request.events.put_nowait(_Refused.of(rejected.status.code, rejected.status.message))
        else:
            self.move(request, link)

    def move(self, request: Request, link: EngineLink | None) -> None:
        """Send a request to another engine, or to the same one where there is no other."""
        request.attempt += 1
        request.segment = request.num_kept = 0
        self._send(request, avoid=link)

    def on_ready(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._send(request)

    def _send(self, request: Request, *, avoid: EngineLink | None = None) -> None:
        ready = [
            link for link in self.links if link.is_open and link.is_ready and self.can_continue(request, link)
        ]
        preferred = [link for link in ready if link is not avoid] or ready
        if not preferred:
            self._waiting.append(request)
            asyncio.get_running_loop().call_later(_RECONNECT_LIMIT_S, self._give_up, request)
            return
        self._turn += 1
        turn = sum(request.job_id.encode()) or self._turn
        link = preferred[turn % len(preferred)]
        request.adapter_digest = link.adapters.get(request.adapter, "")
        link.add(request)

    def can_continue(self, request: Request, link: EngineLink) -> bool:
        adapter = link.adapters.get(request.adapter, "")
        if request.adapter and (not adapter or request.adapter_digest not in ("", adapter)):
            return False
        return not request.output or request.digest == link.digest

    def _give_up(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            request.events.put_nowait(_Refused(grpc.StatusCode.UNAVAILABLE, "no engine is ready"))


class _Session:
    """The turns of a client's session. inputs: those that wait; None is the end."""

    def __init__(self, first: Request) -> None:
        self.before: Request | None = None
        self.turn = first
        self.turn.is_resumable = True
        self.inputs: asyncio.Queue[Sequence[int] | None] = asyncio.Queue()

    def append(self, added: Sequence[int]) -> None:
        """Begin another turn, with all tokens but one that has ended the turn before."""
        before = self.turn
        num_kept = len(before.output) - before.is_by_token
        prompt = [*before.prompt, *before.output[:num_kept], *added]
        self.before = before
        self.turn = Request(prompt, before.sampling, before.seed, before.remaining_ms, is_resumable=True)


class _Refused(Exception):
    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    @classmethod
    def of(cls, number: int, message: str) -> _Refused:
        return cls(next(one for one in grpc.StatusCode if one.value[0] == number), message)


def rows_without_token(prompt: generate_pb2.PromptEmbeds) -> tensor_pb2.Tensor:
    """The embeddings of the positions that have no token."""
    size = len(prompt.embeds.inline) // len(prompt.is_token)
    rows = [number for number, flag in enumerate(prompt.is_token) if not flag]
    content = b"".join(prompt.embeds.inline[number * size : (number + 1) * size] for number in rows)
    shape = [len(rows), prompt.embeds.shape[1]]
    return tensor_pb2.Tensor(dtype=prompt.embeds.dtype, shape=shape, inline=content)


def pack(values: Sequence[int]) -> bytes:
    """A column of u32."""
    return struct.pack(f"<{len(values)}I", *values)


def unpack(column: bytes) -> list[int]:
    """The values of a column of u32. Raises Void for another length."""
    if len(column) % 4:
        raise Void
    return list(struct.unpack(f"<{len(column) // 4}I", column))
