"""An engine as a child process: started, awaited, monitored, stopped."""

from __future__ import annotations

import asyncio
import dataclasses

from engine_svc.build.start_check import check_start
from engine_svc.config import EngineConfig
from engine_svc.model.errors import ModelError
from frontend_svc.engines.connection.transport import EngineTransport, open_transport
from triptych_cli.engines.own_engine import EngineDead
from triptych_cli.serve.readiness import await_ready
from triptych_cli.services import command_of
from triptych_kit.process.child import Child, ChildDied, Output
from triptych_kit.process.setup import process_environment
from triptych_kit.process.supervision import until_ready

_STOP_S = 10.0
# How an engine ends that cannot load what it was given.
_REFUSED = 2


class ChildEngine:
    """One engine process on a free port."""

    def __init__(self, config: EngineConfig, *, start_timeout_s: float = 600.0) -> None:
        self.address = ""
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._child: Child | None = None
        self._monitor: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """Its process id, once it is started."""
        assert self._child is not None, "the engine is started first"
        return self._child.pid

    async def start(self) -> None:
        """Start it and wait until it is ready.

        ModelError or ConfigError if the model or an option is refused; EngineDead, with its cause or its last
        log lines, for other ends.
        """
        await asyncio.get_running_loop().run_in_executor(None, check_start, self._config)
        command = (*command_of("engine"), *flags_of(self._config))
        child = Child("engine-0", command, _environment(), announces=True, output=Output.KEPT)
        self._child = child
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self.address = (await child.announced()).address
                ready = await_ready("engine", self.address)
                await until_ready(ready, child.wait(), lambda _: ChildDied(child))
        except ChildDied as error:
            if child.announced_cause and error.exit_code == _REFUSED:
                raise ModelError(child.announced_cause) from error
            raise EngineDead(str(error)) from error
        except TimeoutError as error:
            raise EngineDead(f"it was not ready within {self._start_timeout_s:g} s") from error
        self._monitor = asyncio.ensure_future(self._watch(child))

    def connect(self, address: str) -> EngineTransport:
        return open_transport(address)

    async def close(self) -> None:
        """Stop the process, with SIGKILL after a timeout."""
        if self._monitor is not None:
            self._monitor.cancel()
            await asyncio.wait({self._monitor})
        if self._child is not None:
            await self._child.stop(_STOP_S)

    async def _watch(self, child: Child) -> None:
        await child.wait()
        if not self.death.done():
            self.death.set_result(str(ChildDied(child)))


def _environment() -> dict[str, str]:
    """Ours, without variables that would change options that the caller left unset."""
    return {
        name: value
        for name, value in process_environment().items()
        if not name.startswith("TRIPTYCH_ENGINE_")
    }


def flags_of(config: EngineConfig) -> list[str]:
    """The flags that reproduce `config`, except for the address."""
    flags = [config.model, "--port=0"]
    values = dataclasses.asdict(config)
    for field in dataclasses.fields(config):
        value = values[field.name]
        if field.name in ("model", "port") or value == field.default or value is None:
            continue
        spelling = field.name.replace("_", "-")
        if isinstance(value, tuple):
            flags.append(f"--{spelling}={','.join(map(str, value))}")
        elif isinstance(value, bool):
            flags.append(f"--{spelling}" if value else f"--no-{spelling}")
        else:
            flags.append(f"--{spelling}={value}")
    return flags
