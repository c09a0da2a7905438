"""One Connect stream: writes that never wait, reads checked for gaps, silence noticed. Knows no requests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

import grpc
import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # its stubs leave it out

from service_kit.clock import Clock
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2

HEARTBEAT_S = 0.5
_MAX_MISSED_HEARTBEATS = 3
_HANDSHAKE_S = 10.0


class StreamLost(Exception):
    """The stream is over; the text says why."""


class EngineStream:
    """A session with an engine from hello to its end, which is always a `StreamLost`."""

    def __init__(
        self, stub: engine_pb2_grpc.EngineCoreServiceStub, clock: Clock, *, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        # Waiting for the connection is free and ends the moment the engine listens, whoever starts first.
        self._call = stub.Connect(wait_for_ready=True)
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._is_closing = False
        self._outbox: deque[engine_pb2.ConnectRequest] = deque()
        self._has_outgoing = asyncio.Event()
        self._last_seq = 0
        self._acked_seq = 0
        self._ack_interval_messages = 0
        self._heard_at = 0.0
        self._is_handling = False

    async def open(self, hello: session_pb2.Hello) -> session_pb2.HelloAck:
        """Say hello and wait for the answer, without limit until a connection is there."""
        try:
            return await self._shake_hands(hello)
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise StreamLost(await self._describe_end()) from error
        except (TimeoutError, StreamLost) as error:
            self._call.cancel()
            raise StreamLost(str(error) or f"no hello_ack within {_HANDSHAKE_S:g} s") from error

    async def run(self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]) -> None:
        """Hand each message to `on_message` until the stream is lost, then raise StreamLost.

        The next message is read when `on_message` is done with one. It is cancelled when the stream is lost
        meanwhile, and never runs once this has ended.
        """
        self._heard_at = self._clock.now()
        tasks = [
            asyncio.ensure_future(self._read(on_message)),
            asyncio.ensure_future(self._write()),
            asyncio.ensure_future(self._watch()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise StreamLost(await self._describe_end()) from error
        finally:
            for task in tasks:
                task.cancel()
            self._call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def send(self, message: engine_pb2.ConnectRequest) -> None:
        """Queue `message`; sent in order, as fast as the peer takes it. Never waits."""
        self._outbox.append(message)
        self._has_outgoing.set()

    def close(self, goodbye: engine_pb2.Goodbye) -> None:
        """End the session on purpose: `run` ends when the engine has read the goodbye."""
        self._is_closing = True
        self.send(engine_pb2.ConnectRequest(goodbye=goodbye))

    async def _read(self, on_message: Callable[[engine_pb2.ConnectResponse], Awaitable[None]]) -> None:
        while True:
            message = await self._call.read()
            if message is EOF:
                raise StreamLost(await self._describe_end())
            self._heard_at = self._clock.now()
            if message.seq != self._last_seq + 1:
                raise StreamLost(f"message {message.seq} came after {self._last_seq}")
            self._last_seq = message.seq
            if (
                self._ack_interval_messages
                and self._last_seq - self._acked_seq >= self._ack_interval_messages
            ):
                self._ack()
            self._is_handling = True
            await on_message(message)
            self._is_handling = False
            # Nothing was read meanwhile, so nothing can be said of the peer's silence.
            self._heard_at = self._clock.now()

    async def _write(self) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            while self._outbox:
                await self._call.write(self._outbox.popleft())
            if self._is_closing:
                await self._call.done_writing()
                # Ending the call here could overtake the goodbye; the engine ends it when it has read it.
                await asyncio.Event().wait()

    async def _watch(self) -> None:
        limit_s = self._heartbeat_s * _MAX_MISSED_HEARTBEATS
        while True:
            slept_from = self._clock.now()
            await asyncio.sleep(self._heartbeat_s)
            now = self._clock.now()
            if now - slept_from > 2 * self._heartbeat_s:
                # We were not running ourselves; what came meanwhile is still to be read.
                self._heard_at = now
            if not self._is_handling and now - self._heard_at > limit_s:
                raise StreamLost(f"no heartbeat for {now - self._heard_at:.1f} s")
            if self._ack_interval_messages and self._acked_seq < self._last_seq:
                self._ack()

    async def _shake_hands(self, hello: session_pb2.Hello) -> session_pb2.HelloAck:
        await self._call.write(engine_pb2.ConnectRequest(hello=hello))
        await self._call.initial_metadata()
        async with asyncio.timeout(_HANDSHAKE_S):
            answer = await self._call.read()
        if answer is EOF:
            raise StreamLost(await self._describe_end())
        if answer.WhichOneof("message") != "hello_ack":
            raise StreamLost("the engine's first message is no hello_ack")
        ack: session_pb2.HelloAck = answer.hello_ack
        self._ack_interval_messages = ack.ack_interval_messages
        return ack

    def _ack(self) -> None:
        self._acked_seq = self._last_seq
        self.send(engine_pb2.ConnectRequest(ack=engine_pb2.Ack(last_seq=self._last_seq)))

    async def _describe_end(self) -> str:
        code = await self._call.code()
        return f"{code.name}: {await self._call.details() or 'the engine ended the stream'}"
