"""The own options of `triptych serve`. Every other flag belongs to the service whose configuration has it."""

from __future__ import annotations

from dataclasses import dataclass

from triptych_kit.config import option

# A mistyped size must not fill the machine with processes.
MAX_ENGINES = 64
_HTTP_PORT = 8000


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A whole stack on this machine: one coordinator, engines, one frontend."""

    model: str | None = option(
        None, help="model folder, or org/name of the hub; without it the embedded model", positional=True
    )
    host: str = option("127.0.0.1", help="address of the frontend; the other services stay on loopback")
    port: int = option(50051, help="port of the frontend; 0 lets the kernel choose")
    http: bool = option(True, help="serve OpenAI's HTTP API, too")
    http_port: int | None = option(
        None, help="port of OpenAI's HTTP API, on --host (default: 8000, or any where --port is 0)"
    )
    data_parallel_size: int = option(
        1, short="dp", help="engines to start, each with the whole model, or its share of the experts"
    )
    data_parallel_external_lb: bool = option(
        False, help="a frontend for each engine, on --port and the ports after it, for a balancer elsewhere"
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
    def ports(self) -> list[int]:
        """Where the frontends listen."""
        kinds = [self.port_of, *([self.http_port_of] if self.http else [])]
        return [port_of(index) for port_of in kinds for index in range(self.num_frontends)]

    def port_of(self, index: int) -> int:
        """The port of a frontend; 0 lets the kernel choose."""
        return self.port + index if self.port else 0

    def http_port_of(self, index: int) -> int:
        """The port of the HTTP API of a frontend; 0 lets the kernel choose."""
        first = self.http_port if self.http_port is not None else _HTTP_PORT if self.port else 0
        return first + index if first else 0

    @property
    def num_frontends(self) -> int:
        return self.data_parallel_size if self.data_parallel_external_lb else 1

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port is {self.port}, the range is 0..65535")
        num_listeners = 1 + self.num_frontends + self.data_parallel_size
        if not 0 <= self.admin_http_port <= 65536 - num_listeners:
            raise ValueError(
                f"admin_http_port is {self.admin_http_port}, the range is 0..{65536 - num_listeners}"
            )
        last = self.http_port_of(self.num_frontends - 1)
        if self.http and not 0 <= last <= 65535:
            raise ValueError(f"http_port is {self.http_port}, the range is 0..{65536 - self.num_frontends}")
        if not 1 <= self.data_parallel_size <= MAX_ENGINES:
            raise ValueError(
                f"data_parallel_size is {self.data_parallel_size}, the range is 1..{MAX_ENGINES}"
            )
        if self.data_parallel_external_lb and self.port + self.data_parallel_size - 1 > 65535:
            raise ValueError(
                f"port is {self.port}, which leaves no port for each of {self.data_parallel_size} frontends"
            )
        if self.startup_timeout_s <= 0 or self.drain_deadline_s < 0:
            raise ValueError("startup_timeout_s must be above 0 and drain_deadline_s at least 0")
