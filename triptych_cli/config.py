"""The own options of `triptych serve`. Every other flag belongs to the service whose configuration has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from triptych_kit.config import option
from triptych_kit.listeners import Listener

# A mistyped size must not fill the machine with processes.
MAX_ENGINES = 64
_GRPC_PORT = 50051
_HTTP_PORT = 8000


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A whole stack on this machine: one coordinator, engines, one frontend."""

    model: str | None = option(
        None,
        help="model folder, GGUF file, or org/name of the hub; without it the embedded model",
        positional=True,
    )
    served_model_name: tuple[str, ...] = option(
        (), help="name that clients ask for; further names are aliases of it (default: the folder's name)"
    )
    host: str = option("127.0.0.1", help="address of the frontend; the other services stay on loopback")
    port: int | None = option(
        None,
        help="port of OpenAI's HTTP API, as in vLLM; of gRPC where HTTP is off or has a flag of its own; "
        "0 lets the kernel choose both",
    )
    http: bool = option(True, help="serve OpenAI's HTTP API, too")
    http_port: int | None = option(None, help=f"port of OpenAI's HTTP API (default: {_HTTP_PORT})")
    grpc_port: int | None = option(None, help=f"port of gRPC (default: {_GRPC_PORT})")
    data_parallel_size: int = option(
        1, short="dp", help="engines to start, each with the whole model, or its share of the experts"
    )
    data_parallel_external_lb: bool = option(
        False,
        help="a frontend for each engine, on the first ports and those after them, for a balancer elsewhere",
    )
    admin_http_port: int = option(
        0,
        help="port of the coordinator's admin HTTP listener; the frontends' and then the engines' follow it; "
        "0 lets the kernel choose each",
    )
    verbose: bool = option(
        False,
        short="v",
        help="show messages of level info on a terminal, too; elsewhere they are shown anyway",
    )
    ready_file: str | None = option(
        None, help="file for addresses and pids as JSON, from when all is ready until the stop"
    )
    startup_timeout_s: float = option(600.0, help="time for everything to get ready, in s")
    drain_deadline_s: float = option(20.0, help="time for running requests to end at a stop, in s")

    @property
    def _is_port_of_grpc(self) -> bool:
        return not self.http or self.http_port is not None

    def listeners(self, *, admin_http_hosts: Mapping[str, str]) -> list[Listener]:
        """All ports of the stack. admin_http_hosts: where each service has its admin HTTP listener."""
        frontends, engines = range(self.num_frontends), range(self.data_parallel_size)
        grpc_flag = "--port" if self.grpc_port is None and self._is_port_of_grpc else "--grpc-port"
        http_flag = "--port" if self.http_port is None and self.port is not None else "--http-port"
        listeners = [
            Listener(f"gRPC of frontend-{index}", grpc_flag, self.host, self.grpc_port_of(index))
            for index in frontends
        ]
        if self.http:
            listeners += [
                Listener(f"HTTP of frontend-{index}", http_flag, self.host, self.http_port_of(index))
                for index in frontends
            ]
        for service, indexes in (("coordinator", range(1)), ("frontend", frontends), ("engine", engines)):
            listeners += [
                Listener(
                    f"metrics of {service}-{index}",
                    "--admin-http-port",
                    admin_http_hosts[service],
                    self.admin_http_port_of(service, index),
                )
                for index in indexes
            ]
        return listeners

    def grpc_port_of(self, index: int) -> int:
        """The gRPC port of a frontend; 0 lets the kernel choose."""
        first = self.grpc_port
        if first is None:
            first = self.port if self.port == 0 or self._is_port_of_grpc else None
        return _following(_GRPC_PORT if first is None else first, index)

    def http_port_of(self, index: int) -> int:
        """The port of the HTTP API of a frontend; 0 lets the kernel choose."""
        first = self.port if self.http_port is None else self.http_port
        return _following(_HTTP_PORT if first is None else first, index)

    def admin_http_port_of(self, service: str, index: int) -> int:
        """From the first port on: the coordinator's, the frontends', then the engines'; 0: any port."""
        before = {"coordinator": 0, "frontend": 1, "engine": 1 + self.num_frontends}
        return _following(self.admin_http_port, before[service] + index)

    @property
    def num_frontends(self) -> int:
        return self.data_parallel_size if self.data_parallel_external_lb else 1

    def __post_init__(self) -> None:
        if self.port is not None and self.grpc_port is not None and self._is_port_of_grpc:
            raise ValueError(f"port is {self.port}, but other flags choose each port")
        for name, first in (
            ("port", self.port),
            ("grpc_port", self.grpc_port),
            ("http_port", self.http_port),
        ):
            if first is not None and not 0 <= first <= 65536 - self.num_frontends:
                limit = f"the range is 0..{65536 - self.num_frontends}"
                raise ValueError(f"{name} is {first}, {limit}")
        num_listeners = 1 + self.num_frontends + self.data_parallel_size
        if not 0 <= self.admin_http_port <= 65536 - num_listeners:
            raise ValueError(
                f"admin_http_port is {self.admin_http_port}, the range is 0..{65536 - num_listeners}"
            )
        if not 1 <= self.data_parallel_size <= MAX_ENGINES:
            raise ValueError(
                f"data_parallel_size is {self.data_parallel_size}, the range is 1..{MAX_ENGINES}"
            )
        if self.startup_timeout_s <= 0 or self.drain_deadline_s < 0:
            raise ValueError("startup_timeout_s must be above 0 and drain_deadline_s at least 0")


def _following(first: int, index: int) -> int:
    return first + index if first else 0
