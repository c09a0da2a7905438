"""Certificates are renewed while streams run: none is lost, and none differs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.certificates import CertificateAuthority
from tests.system.stack import Stack, address_of
from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_cli.services import READINESS, embedded_model
from triptych_kit.channel import ChannelCredentials, open_channel
from triptych_kit.http.admin_http import read_page
from triptych_kit.security.tls import CertificateFiles

pytestmark = pytest.mark.chaos

NUM_STREAMS = 32
NUM_RENEWALS = 3
RESUMED = "triptych_engine_sessions_resumed_total"
LIMIT_S = 300.0


def listener_flags(files: CertificateFiles) -> tuple[str, ...]:
    """Each service shows one certificate to callers and to those that it calls, and verifies both."""
    return (
        f"--ssl-certfile={files.certificate}",
        f"--ssl-keyfile={files.key}",
        f"--ssl-ca-certs={files.ca}",
        f"--peer-certfile={files.certificate}",
        f"--peer-keyfile={files.key}",
        f"--peer-ca-certs={files.ca}",
        "--port=0",
    )


async def ready(channel: grpc.aio.Channel) -> None:
    """Wait until requests are accepted."""
    watching = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=READINESS["frontend"]), timeout=LIMIT_S, wait_for_ready=True
    )
    async for answer in watching:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            watching.cancel()
            return


async def read_ids(
    stub: inference_pb2_grpc.InferenceServiceStub, number: int, started: asyncio.Event
) -> list[int]:
    request = generate_pb2.GenerateRequest(
        prompt=f"Once upon a time, number {number}",
        sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=number, max_tokens=500, ignore_eos=True),
    )
    ids: list[int] = []
    async for response in stub.Generate(request, timeout=LIMIT_S):
        ids += response.delta.token_ids
        started.set()
    return ids


async def value_of(address: str, metric: str, credentials: ChannelCredentials) -> float:
    page = await read_page(address, "/metrics", limit_s=10, credentials=credentials)
    return sum(float(line.split()[-1]) for line in page.decode().splitlines() if line.startswith(metric))


async def test_certificates_are_renewed_under_streams(tmp_path: Path) -> None:
    ca = CertificateAuthority(tmp_path)
    names = ("coordinator", "engine", "frontend")

    def issue() -> dict[str, CertificateFiles]:
        return {name: ca.issue(name, uri=f"spiffe://test/{name}/{name}-0") for name in names}

    files, client = issue(), ca.issue("client", uri="spiffe://test/client/client-0")
    shown = ChannelCredentials(ca=ca.file, certificate=client.certificate, certificate_key=client.key)
    async with Stack() as stack:
        coordinator = await stack.start("coordinator", *listener_flags(files["coordinator"]))
        known = f"--coordinator={address_of(coordinator)}"
        model = (str(embedded_model()), "--num-threads=1", "--max-num-seqs=64")
        engine = await stack.start("engine", *model, *listener_flags(files["engine"]), known)
        frontend = await stack.start("frontend", *listener_flags(files["frontend"]), known)
        assert engine.announcement is not None
        counters = engine.announcement.admin_http
        async with open_channel(address_of(frontend), profile="public", credentials=shown) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            await ready(channel)

            async def round_of(*, renews: bool) -> list[list[int]]:
                started = asyncio.Event()
                tasks = [asyncio.ensure_future(read_ids(stub, one, started)) for one in range(NUM_STREAMS)]
                await asyncio.wait_for(started.wait(), LIMIT_S)
                for number in range(NUM_RENEWALS if renews else 0):
                    before = await value_of(counters, RESUMED, shown)
                    issue()
                    async with asyncio.timeout(LIMIT_S):
                        # Another process has no event to wait for.
                        while await value_of(counters, RESUMED, shown) == before:  # noqa: ASYNC110
                            await asyncio.sleep(0.05)
                    assert not all(task.done() for task in tasks), f"renewal {number} came too late"
                return await asyncio.wait_for(asyncio.gather(*tasks), LIMIT_S)

            undisturbed = await round_of(renews=False)
            renewed = await round_of(renews=True)
    assert renewed == undisturbed
    assert [len(ids) for ids in renewed] == [500] * NUM_STREAMS
    assert all(len(set(ids)) >= 20 for ids in renewed)
