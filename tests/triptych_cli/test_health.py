"""The verb `health`: a word and an exit code."""

from __future__ import annotations

from tests.triptych_cli.fakes import fake_frontend, triptych


async def test_a_ready_service_is_serving_and_exits_0() -> None:
    async with fake_frontend() as served:
        outcome = await triptych("health", "--url", served.url)
    assert (outcome.exit_code, outcome.out) == (0, "SERVING\n")


async def test_a_draining_service_is_not_serving_and_exits_1() -> None:
    async with fake_frontend() as served:
        served.server.drain()
        outcome = await triptych("health", "--url", served.url)
    assert (outcome.exit_code, outcome.out) == (1, "NOT_SERVING\n")


async def test_a_service_that_is_not_served_there_is_unknown() -> None:
    async with fake_frontend() as served:
        outcome = await triptych("health", "--url", served.url, "--service", "engine")
    assert (outcome.exit_code, outcome.out) == (1, "SERVICE_UNKNOWN\n")
    assert outcome.err == f"{served.url} does not serve engine: --service names another service\n"


async def test_without_a_url_it_asks_at_the_port_that_the_environment_gives_the_service() -> None:
    async with fake_frontend() as served:
        port = served.url.rpartition(":")[2]
        outcome = await triptych("health", environment={"TRIPTYCH_FRONTEND_PORT": port})
    assert (outcome.exit_code, outcome.out) == (0, "SERVING\n")


async def test_no_server_exits_1() -> None:
    outcome = await triptych("health", "--url", "grpc://127.0.0.1:1")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("no server answers at 127.0.0.1:1")
