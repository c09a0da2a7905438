"""The frontend as a case sees it: requests of clients at its public address, and the engines that it uses."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc
from triptych.common.v1 import error_pb2, output_pb2, sampling_pb2, tensor_pb2
from triptych.engine.v1 import add_pb2, engine_pb2
from triptych_conformance.cases import NotApplicable, expect, fail
from triptych_conformance.played_engine import EOS_TOKEN_ID, HIDDEN_SIZE, PlayedEngine, Session
from triptych_kit.channel import open_channel
from triptych_kit.eager_writer import EagerWriter
from triptych_kit.errors import ServiceError, from_rpc_error, to_parts

EMBEDDING_BYTES = 4 * HIDDEN_SIZE  # of one position, in fp32
_NUM_PROMPT_TOKENS = 8
# Between requests that show whether an engine is used.
_PROBE_S = 0.05


class ClientCall:
    """A Generate call, read to its end by a task of its own."""

    def __init__(self, call: Any, prompt: list[int], on_change: Callable[[], object]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.text = ""
        self.finished: dict[int, generate_pb2.Finished] = {}
        self.error: ServiceError | None = None
        self.is_over = False
        self._call = call
        self._on_change = on_change
        self._reader = asyncio.create_task(self._read())

    async def cancel(self) -> None:
        self._call.cancel()
        await asyncio.wait([self._reader])

    def _take(self, response: Any) -> None:
        if response.HasField("delta") and response.delta.output_index == 0:
            self.tokens += response.delta.token_ids
            self.text += response.delta.text
        if response.HasField("finished"):
            self.finished[response.finished.output_index] = response.finished

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._take(response)
                self._on_change()
        except grpc.RpcError as error:
            self.error = from_rpc_error(error)
        except asyncio.CancelledError:
            pass
        self.is_over = True
        self._on_change()


class SessionCall(ClientCall):
    """A GenerateSession call. `tokens` are those of all its turns."""

    def __init__(self, call: Any, prompt: list[int], on_change: Callable[[], object]) -> None:
        self.ends: list[output_pb2.FinishReason] = []  # of the turns that others may follow
        # After a failed write of the call itself, its status could not be read.
        self._writer: EagerWriter[inference_pb2.GenerateSessionRequest] = EagerWriter(call.write)
        super().__init__(call, prompt, on_change)

    async def send(self, **message: Any) -> None:
        """Write a message of the client; what becomes of the call is read."""
        with contextlib.suppress(grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            self._writer.start(inference_pb2.GenerateSessionRequest(**message))
            await self._writer.finish()

    def _take(self, response: Any) -> None:
        super()._take(response.response)
        if response.turn_ended:
            self.ends.append(response.response.finished.reason)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One ADD of a client's request, and where it arrived."""

    engine: PlayedEngine
    session: Session
    entry: add_pb2.AddEntry

    def send(self, token_ids: Sequence[int], **options: Any) -> None:
        """Send tokens of the request: see `Session.send_tokens`."""
        self.session.send_tokens(self.entry.handle, token_ids, **options)

    def end_turn(self, token_ids: Sequence[int], *, is_first: bool = True, **end: Any) -> None:
        """Send tokens that end a turn. end: of its end, LENGTH by default."""
        finished = {"row": 0, "reason": output_pb2.FINISH_REASON_LENGTH, "turn_ended": True, **end}
        self.send(token_ids, is_first=is_first, finished=[finished])

    def reject(self, error: ServiceError) -> None:
        code, message, details = to_parts(error)
        status = error_pb2.ErrorStatus(code=code, message=message, details=details)
        rejected = engine_pb2.AddRejected(handle=self.entry.handle, attempt=self.entry.attempt, status=status)
        self.session.in_flight.discard(self.entry.handle)
        self.session.send(add_rejected=rejected)

    @property
    def output(self) -> list[int]:
        """The tokens that it continues."""
        column = self.entry.output_token_ids
        return list(struct.unpack(f"<{len(column) // 4}I", column))


class FrontendUnderTest:
    """Two engines and the clients of a frontend. A case is between `begin_case` and `end_case`."""

    def __init__(
        self,
        listen: Sequence[str],
        *,
        patience_s: float,
        connect_s: float,
        stop_frontend: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.patience_s = patience_s
        self.stop_frontend = stop_frontend
        self._connect_s = connect_s
        self.engines = [
            PlayedEngine(number, address, self._on_change) for number, address in enumerate(listen)
        ]
        self._channel: grpc.aio.Channel | None = None
        self._calls: list[ClientCall] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        for engine in self.engines:
            await engine.start()

    def connect(self, frontend: str) -> None:
        """Open the channel of the clients to the public address of the frontend."""
        self._channel = open_channel(frontend, profile="public")
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def stop(self) -> None:
        if self._channel is not None:
            await self._channel.close(None)
        for engine in self.engines:
            await engine.stop()

    async def until_connected(self) -> None:
        """Wait until the frontend has a session at each engine."""
        await self._until(
            lambda: all(engine.session for engine in self.engines),
            "a session at each engine",
            limit_s=self._connect_s,
        )

    async def begin_case(self) -> None:
        """Wait until the frontend uses both engines."""
        await self.until_connected()
        self.check()
        await self.until_used(*self.engines)
        await self._end_calls()

    async def end_case(self, *, was_kept: bool) -> None:
        """Leave nothing of a case to the next one."""
        await self._end_calls()
        for engine in self.engines:
            session = engine.session
            is_as_before = session and len(session.hellos) == 1 and not engine.is_changed
            if not was_kept or not is_as_before:
                await engine.restart()
            engine.finding = None

    def check(self) -> None:
        """Raise the Finding about what the frontend has sent, if there is one."""
        for engine in self.engines:
            if engine.finding is not None:
                raise engine.finding

    async def until(
        self, condition: Callable[[], object], expected: str, *, limit_s: float | None = None
    ) -> None:
        """Wait until what was received makes `condition` true. A Finding if it does not come."""

        def is_over() -> object:
            self.check()
            return condition()

        await self._until(is_over, expected, limit_s=limit_s)

    def generate(
        self,
        max_tokens: int = 6,
        *,
        timeout_s: float | None = None,
        num_prompt_tokens: int = _NUM_PROMPT_TOKENS,
        orphan_grace_ms: int | None = None,
        embeds: bytes = b"",
        adapter: str = "",
        job_id: str = "",
        is_last_step: bool = False,
        **sampling: Any,
    ) -> ClientCall:
        """A client's request with a prompt of its own. embeds: those of fp32 that come before its tokens."""
        prompt = _random_prompt(num_prompt_tokens)
        params = sampling_pb2.SamplingParams(max_tokens=max_tokens, **sampling)
        request = generate_pb2.GenerateRequest(
            sampling=params,
            orphan_grace_ms=orphan_grace_ms,
            adapter=adapter,
            job_id=job_id,
            is_last_step=is_last_step,
        )
        if embeds:
            num_embeds = len(embeds) // EMBEDDING_BYTES
            is_token = bytes(num_embeds) + bytes([1]) * num_prompt_tokens
            prompt = [0] * num_embeds + prompt
            request.embeds.CopyFrom(_prompt_embeds(embeds, is_token, prompt))
        else:
            request.token_ids.ids[:] = prompt
        call = ClientCall(self._stub.Generate(request, timeout=timeout_s), prompt, self._on_change)
        self._calls.append(call)
        return call

    async def converse(self, max_tokens: int = 6) -> SessionCall:
        """A client's session with a first input of its own."""
        prompt = _random_prompt(_NUM_PROMPT_TOKENS)
        call = SessionCall(self._stub.GenerateSession(), prompt, self._on_change)
        self._calls.append(call)
        params = sampling_pb2.SamplingParams(max_tokens=max_tokens)
        await call.send(start={"token_ids": {"ids": prompt}, "sampling": params})
        return call

    def attempts_of(self, call: ClientCall) -> list[Attempt]:
        """The ADDs of a request, at all engines, in the order of their attempts."""
        prompt = struct.pack(f"<{len(call.prompt)}I", *call.prompt)
        attempts = [
            Attempt(engine, session, entry)
            for engine in self.engines
            for session in engine.sessions
            for entry in session.adds
            if entry.prompt_token_ids == prompt
        ]
        return sorted(attempts, key=lambda attempt: attempt.entry.attempt)

    async def attempt_of(self, call: ClientCall, *, after: Attempt | None = None) -> Attempt:
        """The ADD of a request, or that of its next attempt."""
        least = 0 if after is None else after.entry.attempt + 1

        def found() -> list[Attempt]:
            return [one for one in self.attempts_of(call) if one.entry.attempt >= least]

        await self.until(lambda: found() or call.is_over, f"an ADD with attempt {least}")
        expect(found(), f"an ADD with attempt {least}", f"the client's call ended: {call.error!r}")
        return found()[0]

    async def until_used(self, *engines: PlayedEngine) -> None:
        """Wait until these engines get requests, which takes some that are sent for it."""
        num_adds, probes = [engine.num_adds for engine in engines], []
        try:
            async with asyncio.timeout(self._connect_s):
                while any(engine.num_adds == num for engine, num in zip(engines, num_adds, strict=True)):
                    self.check()
                    probes.append(self.generate())
                    await asyncio.sleep(_PROBE_S)
        except TimeoutError:
            fail("requests at each engine", [bool(engine.session) for engine in engines])
        for probe in probes:
            await probe.cancel()
            for attempt in self.attempts_of(probe):
                attempt.session.abort(attempt.entry.handle)

    async def until_tokens(self, call: ClientCall, num_tokens: int) -> None:
        await self.until(
            lambda: len(call.tokens) >= num_tokens or call.is_over, f"{num_tokens} tokens at the client"
        )

    async def must_finish(self, call: ClientCall, tokens: Sequence[int]) -> None:
        """Wait for the end of a call; the client must have exactly these tokens."""
        await self.until(lambda: call.is_over, "the end of the client's call")
        expect(call.error is None, "an answer to the client", repr(call.error))
        expect(call.tokens == list(tokens), f"tokens {list(tokens)} at the client, once", call.tokens)

    async def must_use(self, engine: PlayedEngine) -> None:
        """Send a request, which must come to this engine, and is answered there."""
        call = self.generate()
        attempt = await self.attempt_of(call)
        expect(attempt.engine is engine, f"an ADD at {engine.engine_id}", f"at {attempt.engine.engine_id}")
        attempt.send([5], is_first=True, ends=True)
        await self.must_finish(call, [5])

    def needs_resume(self, attempt: Attempt) -> None:
        if "resume" not in attempt.session.features:
            raise NotApplicable("the frontend does not name the feature resume")

    async def _until(
        self, condition: Callable[[], object], expected: str, *, limit_s: float | None = None
    ) -> None:
        limit_s = self.patience_s if limit_s is None else limit_s
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            fail(expected, f"nothing of it in {limit_s:g} s")

    async def _end_calls(self) -> None:
        for call in self._calls:
            await call.cancel()
        self._calls.clear()
        for engine in self.engines:
            for session in engine.sessions:
                for handle in sorted(session.in_flight):
                    session.abort(handle)

    def _on_change(self) -> None:
        self._changed.set()


def _random_prompt(num_tokens: int) -> list[int]:
    return [1 + secrets.randbelow(EOS_TOKEN_ID - 1) for _ in range(num_tokens)]


def _prompt_embeds(embeds: bytes, is_token: bytes, token_ids: Sequence[int]) -> generate_pb2.PromptEmbeds:
    content = embeds + bytes(EMBEDDING_BYTES * sum(is_token))
    tensor = tensor_pb2.Tensor(
        dtype=tensor_pb2.D_TYPE_FP32, shape=[len(is_token), HIDDEN_SIZE], inline=content
    )
    return generate_pb2.PromptEmbeds(embeds=tensor, is_token=is_token, token_ids=token_ids)
