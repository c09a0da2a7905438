"""The verb `bench serve`: puts a load on a running server and reports the results."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import grpc.aio
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from triptych.api.v1 import model_pb2, model_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_cli.bench.config import BenchServeConfig
from triptych_cli.bench.dataset import DatasetError, check_lengths, draw_conversations, draw_warmup
from triptych_cli.bench.load import LoadGenerator
from triptych_cli.bench.metrics import OK, summarize
from triptych_cli.bench.openai import openai_transport
from triptych_cli.bench.plot import PlotError, check_can_plot, draw
from triptych_cli.bench.report import Result, print_result, write_json
from triptych_cli.bench.transport import BenchedModel, GRPCTransport, RequestBuilder, Transport
from triptych_cli.client_channel import client_credentials, trust
from triptych_cli.verbs.failures import Target, print_failure
from triptych_client.channel_options import ChannelOptions
from triptych_kit.channel import parse_target, secured_channel
from triptych_kit.clock import MonotonicClock
from triptych_kit.config import ConfigError, read_environment
from triptych_kit.errors import InvalidArgument, ServiceError, Unavailable, rpc_errors_translated
from triptych_kit.telemetry.loop_lag import LoopLag


def arrival_offsets(num_arrivals: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival offsets in s, the first at 0: gaps are gamma distributed with mean 1 / rate.

    `burstiness` is the shape: 1 is a Poisson process, less is burstier, more is more regular. At an infinite
    rate all offsets are 0.
    """
    if math.isinf(rate):
        return [0.0] * num_arrivals
    rng = random.Random(f"arrivals-{seed}")
    gaps = (rng.gammavariate(burstiness, 1.0 / (rate * burstiness)) for _ in range(num_arrivals - 1))
    return list(accumulate(gaps, initial=0.0))


_CONNECT_LIMIT_S = 3.0
_CALL_LIMIT_S = 30.0
_BAR_S = 0.5
_USAGE_ERROR = 2
_INTERRUPTED = 130


def run_bench_serve(config: BenchServeConfig) -> int:
    """Run the load and report the results.

    Returns 0; 1 if the server is not reached or a request failed; 2 for wrong options; 130 after an
    interrupt, which ends the run and reports the results so far.
    """
    try:
        if config.plot is not None:
            check_can_plot()
        for path in (config.json, config.plot):
            _check_writable(path)
        trust(config.cacert)
        if config.backend == "triptych":
            parse_target(config.url)
        return uvloop.run(_bench(config))
    except (PlotError, DatasetError, ConfigError, OSError) as error:
        print(f"triptych bench serve: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except InvalidArgument as error:
        print_failure(error, _target(config))
        return _USAGE_ERROR
    except ServiceError as error:
        print_failure(error, _target(config))
        return 1


def _target(config: BenchServeConfig) -> Target:
    address = config.url if config.backend == "triptych" else config.base_url
    return Target(address, flags={"target": "--url", "model": "--model"})


async def _bench(config: BenchServeConfig) -> int:
    async with _transport(config) as (transport, model):
        conversations = draw_conversations(config, model.vocab_size, left_out=model.left_out)
        check_lengths(conversations, model.max_model_len)
        warmup = draw_warmup(config, model.vocab_size, left_out=model.left_out)
        offsets = arrival_offsets(len(conversations), config.rate, config.burstiness, config.seed)
        clock = MonotonicClock()
        load = LoadGenerator(transport, clock, concurrency=config.concurrency, timeout_s=config.timeout_s)
        for index, turn in enumerate(warmup):
            timeline = await load.send_one(turn, index)
            if timeline.code != OK:
                print(f"{timeline.code}: warm-up: {timeline.message}", file=sys.stderr)
                return 1
        lag = LoopLag(clock)
        # Garbage collections during the run need not traverse the prebuilt requests.
        gc.collect()
        gc.freeze()
        lag.start()
        with _progress_of(load, config.num_requests):
            was_interrupted = await _run_until_interrupt(load.run(conversations, offsets))
        lag.stop()
        gc.unfreeze()
    summary = summarize(load.timelines, config.service_level())
    result = Result(
        config, model.name, summary, load.timelines, load.num_unsent, lag.summary(), was_interrupted
    )
    _show(result)
    if was_interrupted:
        return _INTERRUPTED
    return 1 if summary.num_failed and not config.allow_failures else 0


def _show(result: Result) -> None:
    print_result(result, Console())
    if result.config.json is not None:
        write_json(result, Path(result.config.json))
    if result.config.plot is not None:
        title = f"{result.model}: {result.config.dataset}, {len(result.timelines)} requests"
        draw(result.timelines, title, Path(result.config.plot))


@contextlib.contextmanager
def _progress_of(load: LoadGenerator, num_requests: int) -> Iterator[None]:
    """A bar on a terminal, which takes the generator's loop a moment every half second."""
    console = Console(stderr=True)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Its own thread would take the interpreter from the loop at any time.
    with Progress(*columns, console=console, disable=not console.is_terminal, auto_refresh=False) as bar:
        task = bar.add_task("", total=num_requests)

        async def show() -> None:
            while True:
                bar.update(task, completed=load.num_ended, refresh=True)
                await asyncio.sleep(_BAR_S)

        showing = None if bar.disable else asyncio.ensure_future(show())
        try:
            yield
        finally:
            if showing is not None:
                showing.cancel()
                bar.update(task, completed=load.num_ended, refresh=True)


async def _run_until_interrupt(run: Coroutine[None, None, None]) -> bool:
    """Run to the end or to the first SIGINT; returns whether it was the second."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(run)
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return False


@contextlib.asynccontextmanager
async def _transport(config: BenchServeConfig) -> AsyncIterator[tuple[Transport, BenchedModel]]:
    """How requests reach the server, and its model. Raises ServiceError."""
    if config.backend == "openai":
        credentials = client_credentials()
        key = credentials.api_key or read_environment("OPENAI_API_KEY")
        async with openai_transport(config, replace(credentials, api_key=key)) as transport:
            yield transport
        return
    async with _connected(config.url, config.connections) as channels:
        model = await _model(channels[0], config.model)
        builder = RequestBuilder(config.model or "", _sampling(config), config.seed)
        yield (
            GRPCTransport(channels, builder),
            BenchedModel(model.name, model.vocab_size, model.eos_token_ids, model.max_model_len),
        )


async def _model(channel: grpc.aio.Channel, name: str | None) -> model_pb2.Model:
    stub = model_pb2_grpc.ModelServiceStub(channel)
    with rpc_errors_translated():
        answer = await stub.GetModel(model_pb2.GetModelRequest(model=name or ""), timeout=_CALL_LIMIT_S)
    model: model_pb2.Model = answer.model
    return model


def _sampling(config: BenchServeConfig) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        ignore_eos=config.ignore_eos,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        logprobs=config.logprobs,
        detokenize=None if config.detokenize else False,
        stream_interval=config.stream_interval,
    )


@contextlib.asynccontextmanager
async def _connected(target: str, num_connections: int) -> AsyncIterator[Sequence[grpc.aio.Channel]]:
    """Connected channels, each with its own connection."""
    # Failures are counted, so nothing is retried. Channels with equal options would share a connection.
    options = [*ChannelOptions().as_grpc(), ("grpc.use_local_subchannel_pool", 1)]
    credentials = client_credentials()
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(secured_channel(target, options, credentials))
            for _ in range(num_connections)
        ]
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                await asyncio.gather(*(channel.channel_ready() for channel in channels))
        except TimeoutError as error:
            raise Unavailable(f"{target} was not reached within {_CONNECT_LIMIT_S:g} s") from error
        yield channels


def _check_writable(path: str | None) -> None:
    """Raise OSError, before anything is sent, if the results could not be written after the run."""
    if path is not None and (Path(path).is_dir() or not os.access(Path(path).parent, os.W_OK)):
        raise OSError(f"{path} is a folder, or its folder does not exist or is not writable")
