"""The frontend as a process: announcement, health, drain on SIGTERM, exit codes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from contextlib import AbstractAsyncContextManager

import grpc
import pytest

from frontend_svc.config import FrontendConfig
from tests.frontend_svc.fakes import AT_LENGTH, WAIT_S, Client, FakeEngine, answer, read_all
from tests.processes import announced, source_environment
from triptych_kit.channel import open_channel
from triptych_kit.config import ConfigError, load_config


def frontend(*argv: str) -> AbstractAsyncContextManager[tuple[asyncio.subprocess.Process, dict]]:
    """A frontend process and what it announces."""
    command = (sys.executable, "-m", "frontend_svc.main", *argv, "--port=0")
    return announced(*command, stderr=asyncio.subprocess.DEVNULL)


async def test_sigterm_finishes_streams_refuses_new_ones_and_exits_0():
    engine = FakeEngine()
    await engine.start()
    async with (
        frontend("--engine", engine.address, "--drain-lag-s=0") as (process, record),
        open_channel(record["address"], profile="public") as channel,
    ):
        client = Client(channel)
        await client.wait_ready()
        running = client.generate()
        (request,) = await engine.wait_for_requests(1)
        process.send_signal(signal.SIGTERM)
        await client.wait_ready(is_ready=False)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_all(client.generate())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        engine.step({request: [5]}, finished={request: AT_LENGTH})
        assert (await read_all(running))[2] == [5]
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
    assert (record["service"], record["index"]) == ("frontend", 0)
    await engine.kill()


async def test_requests_sent_shortly_after_sigterm_are_served():
    engine = FakeEngine(answer("x"))
    await engine.start()
    flags = ("--drain-lag-s=60", "--drain-deadline-s=60")
    async with (
        frontend("--engine", engine.address, *flags) as (process, record),
        open_channel(record["address"], profile="public") as channel,
    ):
        client = Client(channel)
        await client.wait_ready()
        process.send_signal(signal.SIGTERM)
        await client.wait_ready(is_ready=False)
        assert (await read_all(client.generate()))[1] == "x"
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
    await engine.kill()


def test_a_configuration_that_cannot_work_exits_2():
    command = [sys.executable, "-m", "frontend_svc.main"]
    for argv, words in (([], "--engine"), (["--engine", "a:1", "--tokenizer", "/nowhere"], "/nowhere")):
        done = subprocess.run(
            [*command, *argv], env=source_environment(), capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


def test_the_frontend_leaves_torch_and_transformers_out():
    program = (
        "import sys, frontend_svc.process.run; "
        "print([name for name in ('torch', 'transformers', 'engine_svc', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=source_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]", done.stderr


# Options of the frontend.


def load(*argv: str) -> FrontendConfig:
    return load_config(FrontendConfig, argv, service="frontend", env={}).config


def test_engines_are_repeatable_and_need_no_coordinator():
    config = load("--engine", "a:1", "--engine=b:2", "--port", "0")
    assert (config.engine, config.coordinator, config.port) == (("a:1", "b:2"), None, 0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "neither --engine nor --coordinator"),
        (("--engine", "a:1", "--port", "70000"), "port 70000"),
        (("--engine", "a:1", "--max-queued-requests", "0"), "--max-queued-requests 0"),
        (("--engine", "a:1", "--slow-reader-s=-1"), "--slow-reader-s"),
        (("--engine", "a:1", "--max-stored-responses=-1"), "--max-stored-responses -1"),
        (("--engine", "a:1", "--max-stored-response-bytes=-1"), "--max-stored-response-bytes -1"),
        (("--engine", "a:1", "--reconnect-window-s=-1"), "--reconnect-window-s"),
        (("--engine", "a:1", "--workers", "0"), "workers 0"),
        (("--engine", "a:1", "--workers", "65"), "workers 65"),
        (("--engine", "a:1", "--workers", "3", "--admin-port", "65534"), "--admin-port 65534"),
        (("--engine", "a:1", "--share-port", "--port", "0"), "--share-port"),
        (("--engine", "a:1", "--max-connection-age-s=-1"), "--max-connection-age-s"),
        (("--engine", "a:1", "--max-connection-age-grace-s=3e6"), "--max-connection-age-grace-s"),
        (("--engine", "a:1", "--max-n", "0"), "--max-n 0"),
        (("--engine", "a:1", "--max-logprobs=-2"), "--max-logprobs -2"),
        (("--engine", "a:1", "--stream-interval", "0"), "--stream-interval 0"),
        (("--engine", "a:1", "--text-workers=-1"), "--text-workers -1"),
        (("--engine", "a:1", "--text-workers=1025"), "--text-workers 1025"),
        (("--engine", "a:1", "--text-time-limit-s", "0"), "--text-time-limit-s 0"),
        (("--engine", "a:1", "--text-time-limit-s", "601"), "--text-time-limit-s 601"),
        (("--engine", "a:1", "--routing-policy", "fastest"), "--routing-policy is 'fastest'"),
        (("--coordinator", "a:1", "--engine-label", "host"), "--engine-label 'host'"),
        (("--engine", "a:1", "--engine-label", "host=a"), "--engine-label chooses"),
        (("--engine", "no port"), "engine"),
        (("--coordinator", "no port"), "coordinator"),
    ],
)
def test_what_cannot_work_is_refused_by_name(argv, words):
    with pytest.raises(ConfigError, match=words):
        load(*argv)
