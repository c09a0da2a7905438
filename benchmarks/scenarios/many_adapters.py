"""A thousand adapters on a few slots: errors, order, and what base streams feel of it.

    python -m benchmarks many_adapters --model M1 --json benchmarks/results/many_adapters.json

An engine with `--max-loras 8` and a frontend, over gRPC. A client keeps base streams open, alone and, in
turns, beside another that keeps requests open: for the model itself, or for adapters drawn uniformly or by
Zipf's law. Promised: no error; the first token of no request comes after those of more than 64 that were sent
later; never more adapters in the engine's memory than `--max-cpu-loras`, as the engine counts them when one
is loaded; the longest gap of the base streams beside adapters is, as the median of the turns, at most 20 ms
more than beside as many requests for the model. That is what adapters add: steps with many prompts take as
long without them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import tempfile
import time
from bisect import bisect, insort
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import numpy as np
import numpy.typing as npt
from safetensors import safe_open
from safetensors.numpy import save_file

from benchmarks.report import Report, Row, print_table
from benchmarks.rig.adapter_load import AdapterClient
from benchmarks.rig.lines import LineProcess, module
from benchmarks.rig.processes import Fleet, ServicePlan
from triptych.admin.v1 import admin_pb2, admin_pb2_grpc
from triptych.engine.v1 import utility_pb2

MAX_OVERTAKING = 64
MAX_ADDED_MS = 20.0
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_NUM_SLOTS = 8
_NUM_LOADED = 32
_NUM_BASE = 16
_BASE_TOKENS = 400
_ZIPF = 1.1
LAWS = ("model", "uniform", "zipf")  # model: none has an adapter, for comparison
_QUIET_S = 4.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--adapters", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=4096, help="for adapters, in each turn")
    parser.add_argument("--open", type=int, default=256, help="of these, at any time")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--law", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--turns", type=int, default=5)


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        write_adapters(options.model, Path(folder), options.adapters, options.rank)
        for law in options.law:
            row = asyncio.run(_measure(options, law, Path(folder)))
            gaps = [_number(each, "added_gap_ms") for each in (*rows, row) if each["law"] == "model"]
            beyond_ms = _number(row, "added_gap_ms") - max([0.0, *gaps])
            rows.append({**row, "gap_beyond_model_ms": beyond_ms})
            print_table(rows[-1:])
    settings = {
        "model": options.model.name,
        "adapters": options.adapters,
        "rank": options.rank,
        "slots": _NUM_SLOTS,
        "loaded": _NUM_LOADED,
        "base_streams": _NUM_BASE,
        "turns": options.turns,
    }
    return Report("many_adapters", settings, rows, shortfalls(rows))


def shortfalls(rows: Sequence[Row]) -> list[str]:
    limits = {
        "errors": 0.0,
        "base_errors": 0.0,
        "most_overtaken": float(MAX_OVERTAKING),
        "most_in_memory": float(_NUM_LOADED),
        "gap_beyond_model_ms": MAX_ADDED_MS,
    }
    return [
        f"{row['law']}: {name} is {row[name]}, at most {limit:g} is promised"
        for row in rows
        for name, limit in limits.items()
        if _number(row, name) > limit
    ]


def _number(row: Row, name: str) -> float:
    return float(str(row[name]))


def write_adapters(model: Path, folder: Path, count: int, rank: int) -> None:
    """Folders of different adapters `0` to `count - 1`, as PEFT saves them."""
    with safe_open(model / "model.safetensors", framework="np") as file:
        shapes = {
            name.removesuffix(".weight"): file.get_slice(name).get_shape()
            for name in file.keys()  # noqa: SIM118  It is no mapping.
            if name.removesuffix(".weight").rpartition(".")[2] in _MODULES
        }
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": list(_MODULES),
    }
    draw = np.random.default_rng(0)
    for index in range(count):
        tensors: dict[str, npt.NDArray[np.float16]] = {}
        for name, (outputs, inputs) in shapes.items():
            prefix = f"base_model.model.{name}.lora_"
            tensors[f"{prefix}A.weight"] = (draw.standard_normal((rank, inputs)) / inputs**0.5).astype(
                np.float16
            )
            tensors[f"{prefix}B.weight"] = (draw.standard_normal((outputs, rank)) * 0.05).astype(np.float16)
        target = folder / str(index)
        target.mkdir()
        save_file(tensors, target / "adapter_model.safetensors")
        (target / "adapter_config.json").write_text(json.dumps(config))


async def _measure(options: argparse.Namespace, law: str, adapters: Path) -> Row:
    choose = random.Random(law)
    weights = [1 / (index + 1) ** _ZIPF if law == "zipf" else 1.0 for index in range(options.adapters)]
    quiet_ms, added_ms, took_s = [], [], []
    num_errors, first_error, most_overtaken = 0, "", 0
    async with (
        _serving(options.model, adapters, options.requests) as (address, engine),
        AdapterClient(address) as client,
    ):
        base = _BaseStreams(client)
        with LineProcess(module("benchmarks.rig.adapter_load", f"--address={address}")) as load:
            for _ in range(options.turns):
                drawn = choose.choices(range(options.adapters), weights, k=options.requests)
                names = ["" if law == "model" else str(index) for index in drawn]
                began_at = time.perf_counter()
                await asyncio.sleep(_QUIET_S)
                quiet = base.longest_gap_ms(began_at)
                began_at = time.perf_counter()
                answer = await asyncio.to_thread(load.ask, adapters=names, open=options.open)
                took_s.append(time.perf_counter() - began_at)
                quiet_ms.append(quiet)
                added_ms.append(base.longest_gap_ms(began_at) - quiet)
                firsts = answer["firsts"]
                num_errors += firsts.count(None)
                first_error = first_error or answer["first_error"]
                arrived = [(at, index) for index, at in enumerate(firsts) if at is not None]
                most_overtaken = max(most_overtaken, _most_overtaken(arrived))
        await base.stop()
        most_in_memory = await _most_in_memory(engine)
    return {
        "law": law,
        "requests": options.turns * options.requests,
        "errors": num_errors,
        "first_error": first_error,
        "base_errors": base.num_errors,
        "most_overtaken": most_overtaken,
        "most_in_memory": most_in_memory,
        "turn_s": statistics.median(took_s),
        "longest_gap_ms": statistics.median(quiet_ms),
        "added_gap_ms": statistics.median(added_ms),
    }


async def _most_in_memory(engine: str) -> int:
    """How many adapters the engine with this admin address has had in memory at most."""
    call = utility_pb2.UtilityCall(collective={"name": "adapters"})
    async with grpc.aio.insecure_channel(engine) as channel:
        answer = await admin_pb2_grpc.AdminServiceStub(channel).Utility(admin_pb2.UtilityRequest(call=call))
    (rank,) = answer.result.collective.ranks
    return int(re.findall(r"(\d+) at most", rank)[0])


def _most_overtaken(arrived: Sequence[tuple[float, int]]) -> int:
    """Of requests in the order in which they were sent, the most later ones that came before one of them."""
    seen: list[int] = []
    most = 0
    for _, index in sorted(arrived):
        most = max(most, len(seen) - bisect(seen, index))
        insort(seen, index)
    return most


class _BaseStreams:
    """Streams of the model that follow each other until `stop`."""

    def __init__(self, client: AdapterClient) -> None:
        self._client = client
        self._gaps: list[tuple[float, float]] = []  # when a token came, and how long after the one before
        self.num_errors = 0
        self._tasks = [asyncio.create_task(self._repeat(seed)) for seed in range(_NUM_BASE)]

    def longest_gap_ms(self, since: float) -> float:
        return 1000 * max(gap for at, gap in self._gaps if at - gap >= since)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _repeat(self, seed: int) -> None:
        while True:
            before = None
            try:
                async for _ in self._client.tokens("", _BASE_TOKENS, seed):
                    now = time.perf_counter()
                    if before is not None:
                        self._gaps.append((now, now - before))
                    before = now
            except grpc.aio.AioRpcError:
                self.num_errors += 1


@contextlib.asynccontextmanager
async def _serving(model: Path, adapters: Path, num_requests: int) -> AsyncIterator[tuple[str, str]]:
    """The addresses of a frontend, and of the admin listener of its engine."""
    with tempfile.TemporaryDirectory() as folder:
        async with Fleet(Path(folder)) as fleet:
            flags = ("--enable-lora", f"--max-loras={_NUM_SLOTS}", f"--max-cpu-loras={_NUM_LOADED}")
            engine = fleet.add(
                ServicePlan("engine", 0, (str(model), "--num-threads=1", *flags, f"--lora-dir={adapters}"))
            )
            limits = (f"--max-queued-requests={2 * num_requests}", "--text-workers=1")
            frontend = fleet.add(ServicePlan("frontend", 0, (f"--engine={engine.address}", *limits)))
            await fleet.start()
            await fleet.until_routed()
            yield frontend.address, engine.admin_address
