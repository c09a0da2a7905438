"""Ray actor that runs one engine process, on the node and with the devices that Ray assigns. Needs Ray.

The engine is a separate process, not code in Ray's worker: it has its own signals, event loop and gRPC, it
ends with an exit code as usual, and the kernel kills it when its actor dies.
"""

from __future__ import annotations

import ray

from triptych_cli.ray.placement import EnginePlacement
from triptych_cli.services import command_of
from triptych_kit.process.child import Child, ChildDied, Output
from triptych_kit.process.setup import process_environment


class EngineActor:
    """Starts, monitors and drains one engine; an asynchronous actor, so calls do not block each other."""

    def __init__(self, name: str, index: int) -> None:
        self._name = name
        self._index = index
        self._child: Child | None = None

    async def start(self, flags: list[str], environment: dict[str, str]) -> EnginePlacement | str:
        """Start the engine on this node's address; returns its addresses, or an error text.

        A text, because Ray reconstructs an exception from its arguments.
        """
        if self._child is not None and self._child.is_running:
            return f"{self._name} runs already, with pid {self._child.pid}"
        devices = _devices()
        child = Child(
            f"engine-{self._index}",
            [*command_of("engine"), *flags, f"--host={_node_address()}", f"--index={self._index}"],
            {**process_environment(), **environment, "CUDA_VISIBLE_DEVICES": devices},
            announces=True,
            output=Output.COPIED,
        )
        self._child = child
        try:
            announced = await child.announced()
        except ChildDied as died:
            return str(died)
        node_id = str(ray.get_runtime_context().get_node_id())
        return EnginePlacement(
            announced.address, announced.admin_address, announced.admin_http, node_id, announced.pid, devices
        )

    async def ended(self) -> int:
        """Wait for the engine's end; returns its exit code, a signal as a negative number."""
        child = self._started()
        await child.wait()
        return _status(child)

    async def drain(self, limit_s: float) -> int:
        """SIGTERM, then SIGKILL after `limit_s`; returns the exit code. A second call cuts the drain."""
        child = self._started()
        await child.stop(limit_s)
        return _status(child)

    def _started(self) -> Child:
        if self._child is None:
            raise RuntimeError(f"{self._name} was not started")
        return self._child


def _devices() -> str:
    """The GPUs that Ray has assigned to this actor, for CUDA_VISIBLE_DEVICES; "" hides all."""
    return ",".join(ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


def _node_address() -> str:
    return str(ray.util.get_node_ip_address())


def _status(child: Child) -> int:
    assert child.exit_code is not None
    return child.exit_code
