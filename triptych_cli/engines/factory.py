"""Chooses the client of engines, for `LLM` and for `triptych serve`. Imports no engine before one is made."""

from __future__ import annotations

from typing import Literal, overload

from engine_svc.config import EngineConfig
from triptych_cli.engines.own_engine import OwnEngine
from triptych_kit.process.setup import prepare_torch

# What a frontend process gets, so that its client uses the intended ones of the coordinator's engines.
FrontendFlags = tuple[str, ...]


@overload
def make_engine_client(
    *, is_async: Literal[False], is_multiprocess: bool, config: EngineConfig, start_timeout_s: float
) -> OwnEngine: ...


@overload
def make_engine_client(
    *,
    is_async: Literal[True],
    is_multiprocess: bool,
    data_parallel_size: int = 1,
    has_external_balancer: bool = False,
) -> list[FrontendFlags]: ...


def make_engine_client(
    *,
    is_async: bool,
    is_multiprocess: bool,
    config: EngineConfig | None = None,
    start_timeout_s: float = 600.0,
    data_parallel_size: int = 1,
    has_external_balancer: bool = False,
) -> OwnEngine | list[FrontendFlags]:
    """The client for a caller; called in its event loop. All run the frontend's `EngineClient`.

    | caller | engine | client |
    |---|---|---|
    | blocking | in this process | in process: messages are handed over in memory |
    | blocking | in another process | sync: one child process, called through a background event loop |
    | asyncio | in this process | NotImplementedError |
    | asyncio | in another process | async: a frontend process with one engine |
    | asyncio | several, external balancer | a frontend process for each rank, with the engine of that rank |
    | asyncio | several | balanced: a frontend process that chooses among all ranks |

    A blocking caller gets its engine, to be started; an asyncio caller gets the flags of each frontend.
    """
    if not is_async:
        if config is None:
            raise ValueError("config is None: a blocking client starts its engine")
        # Imported here: a supervisor of processes needs neither torch nor grpc.
        if is_multiprocess:
            from triptych_cli.engines.child_engine import ChildEngine

            return ChildEngine(config, start_timeout_s=start_timeout_s)
        prepare_torch()
        from triptych_cli.engines.in_process import InProcessEngine

        return InProcessEngine(config)
    if not is_multiprocess:
        raise NotImplementedError("an asyncio client needs its engines in other processes")
    if data_parallel_size > 1 and has_external_balancer:
        return [(f"--engine-label=dp_rank={rank}",) for rank in range(data_parallel_size)]
    return [()]
