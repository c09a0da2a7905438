"""Transports of `LLM`: a channel to the public API of a local, child or remote engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

import grpc.aio

from engine_svc.config import EngineConfig
from frontend_svc.build import Frontend
from frontend_svc.config import FrontendConfig
from frontend_svc.engines.connection.client import EngineState
from launcher.engines.child_engine import ChildEngine
from launcher.engines.core_client import EngineDead
from launcher.engines.hosted import HostedEngine
from launcher.engines.local_channel import LocalChannel, LocalServer
from service_kit.channel import open_channel
from service_kit.errors import Unavailable

# `LLM` limits its requests in flight itself, so the frontend's queue must not add a limit.
_NO_LIMIT = 2**31 - 1
_LOOK_S = 0.01
# The end of an engine is seen on its stream first; the reason follows within this time.
_DEATH_REASON_WAIT_S = 1.0


class OwnEngine(Protocol):
    """An engine that its transport starts and closes."""

    @property
    def address(self) -> str: ...

    async def start(self) -> None:
        """Load; returns once requests are accepted, or raises EngineDead."""
        ...

    def connect(self, address: str) -> grpc.aio.Channel: ...

    async def close(self) -> None: ...


class Transport(Protocol):
    """Access to a local or remote frontend. Used in one event loop."""

    @property
    def death(self) -> asyncio.Future[str]:
        """Resolves to the reason when the transport has failed for good."""
        ...

    async def start(self) -> grpc.aio.Channel:
        """Returns the channel to the public API once a model is served."""
        ...

    async def close(self) -> None: ...


class RemoteTransport:
    """A frontend elsewhere. It may come back, so `death` never resolves."""

    def __init__(self, address: str, *, start_timeout_s: float) -> None:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._channel = open_channel(address, profile="public")
        self._address = address
        self._start_timeout_s = start_timeout_s

    async def start(self) -> grpc.aio.Channel:
        try:
            await asyncio.wait_for(self._channel.channel_ready(), self._start_timeout_s)
        except TimeoutError as error:
            raise Unavailable(
                f"no frontend was reached at {self._address} within {self._start_timeout_s:g} s"
            ) from error
        return self._channel

    async def close(self) -> None:
        await self._channel.close(None)


class LocalTransport:
    """A local engine and a frontend in this process, without servers."""

    def __init__(
        self,
        make_engine: Callable[[Callable[[str], None]], OwnEngine],
        *,
        tokenizer: str | None,
        max_logprobs: int,
        start_timeout_s: float,
    ) -> None:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._engine = make_engine(self._die)
        self._max_logprobs = max_logprobs
        self._tokenizer = tokenizer
        self._start_timeout_s = start_timeout_s
        self._frontend: Frontend | None = None
        self._channel: LocalChannel | None = None

    async def start(self) -> grpc.aio.Channel:
        """Load the engine, then connect the frontend to it."""
        await self._engine.start()
        config = FrontendConfig(
            engine=(self._engine.address,),
            tokenizer=self._tokenizer,
            max_logprobs=self._max_logprobs,
            max_queued_requests=_NO_LIMIT,
            max_queued_prompt_tokens=_NO_LIMIT,
        )
        self._frontend = frontend = Frontend(config, connect=self._engine.connect)
        frontend.connect(address="")
        async with asyncio.timeout(self._start_timeout_s):
            await self._until_ready(frontend)
        self._channel = LocalChannel(LocalServer(frontend.public.registrations, service="llm"))
        return self._channel

    async def close(self) -> None:
        """End calls, then the frontend, then the engine."""
        if self._channel is not None:
            await self._channel.close()
        if self._frontend is not None:
            await self._frontend.close()
        await self._engine.close()

    async def _until_ready(self, frontend: Frontend) -> None:
        while not frontend.directory.is_ready:
            if self.death.done():
                raise EngineDead(self.death.result())
            for client in frontend.directory.clients():
                # The engine runs, so a retry would fail for the same reason, e.g. a missing tokenizer.
                if client.state is EngineState.DOWN and client.down_reason:
                    raise Unavailable(client.down_reason)
            await asyncio.sleep(_LOOK_S)

    def _die(self, reason: str) -> None:
        if not self.death.done():
            self.death.set_result(reason)


def make_transport(
    kind: str,
    *,
    config: EngineConfig | None,
    address: str | None,
    environment: Mapping[str, str],
    tokenizer: str | None,
    start_timeout_s: float,
) -> Transport:
    """The transport of `kind`: remote, child or in-process. Called in its event loop."""
    if kind == "remote":
        assert address is not None, "checked by the facade"
        return RemoteTransport(address, start_timeout_s=start_timeout_s)
    assert config is not None, "checked by the facade"

    def make_engine(on_death: Callable[[str], None]) -> OwnEngine:
        if kind == "in-process":
            return HostedEngine(config, on_death=on_death)
        return ChildEngine(config, environment, on_death=on_death, start_timeout_s=start_timeout_s)

    return LocalTransport(
        make_engine,
        tokenizer=tokenizer,
        max_logprobs=config.max_logprobs,
        start_timeout_s=start_timeout_s,
    )


async def death_reason(transport: Transport) -> str:
    """Why the transport is dead, waiting up to a second for it; "" if it is alive."""
    done, _ = await asyncio.wait({transport.death}, timeout=_DEATH_REASON_WAIT_S)
    return transport.death.result() if done else ""
