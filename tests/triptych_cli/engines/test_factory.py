from __future__ import annotations

import pytest

from engine_svc.config import EngineConfig
from triptych_cli.engines.child_engine import ChildEngine
from triptych_cli.engines.factory import make_engine_client
from triptych_cli.engines.in_process import InProcessEngine

CONFIG = EngineConfig(model="folder")


async def test_a_blocking_caller_gets_an_engine_in_its_process_or_in_a_child() -> None:
    here = make_engine_client(is_async=False, is_multiprocess=False, config=CONFIG, start_timeout_s=1.0)
    child = make_engine_client(is_async=False, is_multiprocess=True, config=CONFIG, start_timeout_s=1.0)
    assert isinstance(here, InProcessEngine)
    assert isinstance(child, ChildEngine)


def test_an_asyncio_caller_without_another_process_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="in other processes"):
        make_engine_client(is_async=True, is_multiprocess=False)


@pytest.mark.parametrize(
    ("size", "is_external", "frontends"),
    [
        (1, False, [()]),
        (1, True, [()]),
        (3, False, [()]),
        (2, True, [("--engine-label=dp_rank=0",), ("--engine-label=dp_rank=1",)]),
    ],
)
def test_several_ranks_are_balanced_unless_a_balancer_elsewhere_does(size, is_external, frontends) -> None:
    client = make_engine_client(
        is_async=True, is_multiprocess=True, data_parallel_size=size, has_external_balancer=is_external
    )
    assert client == frontends


def test_a_blocking_caller_gives_the_configuration_of_its_engine() -> None:
    with pytest.raises(ValueError, match="config is None"):
        make_engine_client(is_async=False, is_multiprocess=True)  # type: ignore[call-overload]
