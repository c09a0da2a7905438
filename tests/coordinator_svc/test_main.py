"""The coordinator as a process."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import grpc
import pytest

from coordinator_svc.config import CoordinatorConfig
from tests.coordinator_svc.fakes import EnginePeer, registration
from tests.processes import announced
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.coordinator.v1 import coordinator_pb2_grpc
from triptych_kit.channel import open_channel

_HEAVY = ("torch", "transformers", "tokenizers", "numpy", "triton", "jinja2")


async def test_it_announces_itself_reports_its_status_and_stops_at_once_with_sessions_open() -> None:
    command = (sys.executable, "-m", "coordinator_svc.main", "--port=0", "--index=3", "--lease-ms=9000")
    async with (
        announced(*command) as (process, record),
        open_channel(record["address"]) as channel,
        open_channel(record["admin_address"]) as admin,
    ):
        assert (record["service"], record["index"], record["pid"]) == ("coordinator", 3, process.pid)
        peer = EnginePeer(coordinator_pb2_grpc.CoordinatorServiceStub(channel))
        assert (await peer.register(registration())).lease_ms == 9000
        answer = await admin_pb2_grpc.AdminServiceStub(admin).GetStatus(
            admin_pb2.GetStatusRequest(), timeout=60
        )
        values = {value.key: value.number for value in answer.values}
        assert (values["num_engines"], values["num_ready"], values["num_frontends"]) == (1, 0, 0)

        process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError, match="the coordinator stops"):
            await peer.call.read()
        assert await asyncio.wait_for(process.wait(), 60) == 0


def test_it_imports_nothing_heavy() -> None:
    program = f"import sys, coordinator_svc.run; print([name for name in {_HEAVY} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


def test_a_wrong_flag_exits_2() -> None:
    command = [sys.executable, "-m", "coordinator_svc.main", "--lease", "5"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 2
    assert "did you mean --lease-ms" in answer.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease_ms": 10},
        {"lease_ms": 3_600_001},
        {"port": 70_000},
        {"admin_port": -1},
        {"drain_deadline_s": -1},
    ],
    ids=str,
)
def test_a_configuration_that_cannot_work_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CoordinatorConfig(**wrong)
