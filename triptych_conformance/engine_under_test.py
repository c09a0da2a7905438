"""The engine as a case sees it: what it says of itself, streams to it, and requests that suit its model."""

from __future__ import annotations

import asyncio
import secrets
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_conformance.cases import NotApplicable, expect, fail
from triptych_conformance.engine_stream import EngineStream
from triptych_kit.channel import CHANNEL_OPTIONS, parse_target

REVISION = 1
FEATURES = ("resume", "adopt", "input_segments")
# Tokens of the answer that the others are compared with.
NUM_REFERENCE_TOKENS = 32
_NUM_PROMPT_TOKENS = 8
# The longest request of a case; it is aborted before its end.
_MAX_LONG_TOKENS = 2000
_SEED = 7
# How long the process that follows a killed one may take, with its model.
_RESTART_S = 60.0
_RECONNECT_S = 0.05


@dataclass(slots=True)
class EngineFacts:
    """The constants of a run, common to all its cases.

    drain: makes the engine drain.  restart: kills the engine and starts another process at its address.  Both
    if the caller knows how.
    """

    address: str
    patience_s: float
    hello_ack: session_pb2.HelloAck
    ready: session_pb2.Ready
    drain: Callable[[], Awaitable[object]] | None = None
    restart: Callable[[], Awaitable[object]] | None = None
    reference: list[int] = field(default_factory=list)
    comparing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __str__(self) -> str:
        ack = self.hello_ack
        features = ", ".join(ack.features) or "none"
        return (
            f"engine {self.address}: {ack.engine_id}, model {self.ready.model_name}, revision "
            f"{ack.schema_revision}, features {features}"
        )


class EngineUnderTest:
    """Opens the streams of one case, and closes them at its end: an async context manager."""

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._channels: list[grpc.aio.Channel] = []
        self._streams: list[EngineStream] = []

    async def __aenter__(self) -> EngineUnderTest:
        return self

    async def __aexit__(self, kind: object, error: object, traceback: object) -> None:
        for stream in self._streams:
            # A session that is only cut would keep its requests until its window is over.
            await stream.leave()
        for channel in self._channels:
            await channel.close(None)
        if error is None:
            for stream in self._streams:
                stream.check()

    def connect(self, *, options: Sequence[tuple[str, int]] = (), **hello: Any) -> EngineStream:
        """A stream of a frontend of its own that has sent nothing yet. options: of its channel."""
        fields = {
            "frontend_id": f"conformance-{secrets.token_hex(4)}",
            "session_id": secrets.token_hex(16),
            "frontend_epoch": secrets.randbits(63) | 1,
            "schema_revision": REVISION,
            "features": FEATURES,
            **hello,
        }
        return self._stream(fields, options=options)

    async def open(self, *, options: Sequence[tuple[str, int]] = (), **hello: Any) -> EngineStream:
        """The same, with its session open and ready."""
        stream = self.connect(options=options, **hello)
        await stream.open()
        return stream

    async def resume(
        self,
        stream: EngineStream,
        *,
        last_seq: int | None = None,
        engine_epoch: int | None = None,
        **hello: Any,
    ) -> EngineStream:
        """Another stream that asks to continue the session of `stream` after `last_seq`, by default the last.

        Returns it with its hello_ack.
        """
        if engine_epoch is None:
            engine_epoch = self.facts.hello_ack.engine_epoch
        last_seq = stream.record.last_seq if last_seq is None else last_seq
        point = session_pb2.ResumePoint(engine_epoch=engine_epoch, last_seq=last_seq)
        fields = {**stream.hello_fields, "resume": point, **hello}
        resumed = self._stream(fields, record=stream.record)
        await resumed.say_hello()
        await resumed.until(lambda: resumed.hello_ack is not None, "hello_ack")
        return resumed

    async def must_resume(self, stream: EngineStream, *, last_seq: int | None = None) -> EngineStream:
        resumed = await self.resume(stream, last_seq=last_seq)
        expect(resumed.hello_ack is not None and resumed.hello_ack.resume_ok, "resume_ok true", "false")
        return resumed

    async def restart(self) -> EngineStream:
        """Kill the engine. Returns a stream to the process that follows it, which may be loading."""
        if self.facts.restart is None:
            raise NotApplicable("it is not known how to kill the engine: --restart COMMAND")
        await self.facts.restart()
        ends_at = time.monotonic() + _RESTART_S
        while not await (stream := self.connect()).is_greeted():
            expect(time.monotonic() < ends_at, f"another process within {_RESTART_S:g} s", stream.end)
            await asyncio.sleep(_RECONNECT_S)
        assert stream.hello_ack is not None, "a stream that is greeted has it"
        self.facts.hello_ack = stream.hello_ack
        return stream

    async def until_loaded(self, stream: EngineStream) -> None:
        """Wait for ready after a restart."""
        stream.patience_s = _RESTART_S
        await stream.until(lambda: stream.record.ready is not None, "ready")
        stream.patience_s = self.facts.patience_s

    async def must_be_new(self, resumed: EngineStream, refusal: session_pb2.ResumeRefusal) -> None:
        """A new session has begun, and hello_ack says why; an engine that never resumes need not say so."""
        ack = resumed.hello_ack
        if ack is None or ack.resume_ok:
            fail("resume_ok false", "true")
        if "resume" in self.facts.hello_ack.features:
            name = session_pb2.ResumeRefusal.Name(refusal)
            expect(ack.resume_refusal == refusal, f"resume_refusal {name}", ack.resume_refusal)
        # Numbers that do not begin at 1 are a finding of the stream's own.
        await resumed.until(lambda: resumed.record.ready is not None, "ready in the new session")

    def needs(self, feature: str) -> None:
        """Raise NotApplicable if the engine does not have `feature`."""
        if feature not in self.facts.hello_ack.features:
            raise NotApplicable(f"the engine does not name the feature {feature}")

    @property
    def prompt(self) -> list[int]:
        """Token ids that the model has, none of which ends a sequence."""
        ends = set(self.facts.ready.eos_token_ids)
        ids = (number for number in range(11, self.facts.ready.vocab_size, 7) if number not in ends)
        return [next(ids) for _ in range(_NUM_PROMPT_TOKENS)]

    @property
    def long(self) -> int:
        """max_tokens of a request that is still in flight a moment later."""
        return min(self.facts.ready.max_model_len - _NUM_PROMPT_TOKENS - 1, _MAX_LONG_TOKENS)

    def entry(
        self,
        handle: int,
        max_tokens: int = NUM_REFERENCE_TOKENS,
        *,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> add_pb2.AddEntry:
        """An ADD with the common prompt and seed, greedy and without an end but its length."""
        params = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **(sampling or {})}
        defaults = {
            "handle": handle,
            "request_id": secrets.token_hex(16),
            "prompt_token_ids": column(self.prompt),
            "request_seed": _SEED,
        }
        if "pooling" not in fields:
            defaults["sampling"] = sampling_pb2.SamplingParams(**params)
        return add_pb2.AddEntry(**{**defaults, **fields})

    async def reference(self) -> list[int]:
        """The tokens that a request of `entry` has in a session where nothing is disturbed."""
        async with self.facts.comparing:
            if not self.facts.reference:
                stream = await self.open()
                await stream.add(self.entry(1))
                await stream.until_finished(1)
                self.facts.reference = stream.record.tokens[1]
                await stream.goodbye()
        return self.facts.reference

    def _stream(
        self, hello: dict[str, Any], *, options: Sequence[tuple[str, int]] = (), **keywords: Any
    ) -> EngineStream:
        unlimited = {"grpc.max_send_message_length": -1, "grpc.max_receive_message_length": -1}
        # Of two values of one option gRPC takes the first.
        values = {**dict(CHANNEL_OPTIONS["internal"]), **unlimited, **dict(options)}
        channel = grpc.aio.insecure_channel(self.facts.address, options=list(values.items()))
        self._channels.append(channel)
        stream = EngineStream(channel, hello, patience_s=self.facts.patience_s, **keywords)
        self._streams.append(stream)
        return stream


async def inspect_engine(
    target: str,
    *,
    patience_s: float,
    drain: Callable[[], Awaitable[object]] | None = None,
    restart: Callable[[], Awaitable[object]] | None = None,
) -> EngineFacts:
    """An engine's facts from its first messages. Raises a Finding where they are missing."""
    facts = EngineFacts(
        parse_target(target), patience_s, session_pb2.HelloAck(), session_pb2.Ready(), drain, restart
    )
    async with EngineUnderTest(facts) as engine:
        stream = await engine.open()
        assert stream.hello_ack is not None and stream.record.ready is not None, "an open stream has both"
        facts.hello_ack, facts.ready = stream.hello_ack, stream.record.ready
    return facts


def column(values: Sequence[int]) -> bytes:
    """A column of little-endian u32."""
    return struct.pack(f"<{len(values)}I", *values)
