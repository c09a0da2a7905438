"""Requests that crash engines, again and again and in variations, beside the streams of another tenant.

    python -m tests.acceptance poison --json benchmarks/results/poison.json

`triptych serve -dp 3` with two keys and the plugin of tests/chaos that ends, hangs, fails or corrupts the
step of a marked request, or takes all memory. In each round a tenant sends each kind in variations of
sampling and of prompt, one after the other. Promised: at most two engines die in a round, no stream of the
other tenant is refused or differs from an undisturbed run, and all engines are back at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import grpc.aio

from benchmarks.report import Report, Row
from benchmarks.rig.history import Oracle
from benchmarks.rig.streams import FIRST_MARKER_ID, FIRST_PLAIN_ID, Case, Flow, Load, make_cases
from frontend_svc.generation.poison import QUARANTINED
from tests.chaos.fault_plugin import (
    FOLDER_VARIABLE,
    MARKER_POSITION,
    EngineFault,
    strikes,
    write_distribution,
)
from tests.chaos.served import ServedStack
from triptych.api.v1 import model_pb2, model_pb2_grpc
from triptych.common.v1 import sampling_pb2
from triptych_kit.channel import ChannelCredentials, open_channel

MAX_DEATHS = 2
_NUM_ENGINES = 3
_NUM_TOKENS = 64
_NUM_PROMPT_TOKENS = 48
_LIMIT_S = 120.0
_POLL_S = 0.05
_KEYS = {"legal": "triptych-key-of-the-legal-tenant", "hostile": "triptych-key-of-the-hostile-tenant"}
_DEADLY = (EngineFault.EXIT, EngineFault.FREEZE, EngineFault.MEMORY)
_KINDS = (EngineFault.RAISE, EngineFault.NAN, *_DEADLY)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--variations", type=int, default=12, help="of each kind of fault")
    parser.add_argument("--streams", type=int, default=32, help="of the other tenant, at any time")


def run(options: argparse.Namespace) -> Report:
    rows: list[Row] = []
    for seed in range(options.rounds):
        rows.append(asyncio.run(poison_round(seed, options.variations, options.streams)))
        print(rows[-1], file=sys.stderr, flush=True)
    shortfalls = [
        f"round {row['round']}: {row}"
        for row in rows
        if int(str(row["deaths"])) > MAX_DEATHS or row["violations"] or row["engines"] != _NUM_ENGINES
    ]
    settings = {"variations": options.variations, "streams": options.streams, "max_deaths": MAX_DEATHS}
    return Report("poison", settings, rows, shortfalls)


async def poison_round(seed: int, num_variations: int, num_streams: int, *, has_keys: bool = True) -> Row:
    """One stack, and every variation of every kind in an order that the seed chooses.

    has_keys: else both tenants are one, variations differ in sampling alone, and kinds that end the process
    follow each other faster than engines start.
    """
    rng = random.Random(seed)
    kinds = _KINDS if has_keys else (EngineFault.EXIT, EngineFault.MEMORY)
    attacks = [(fault, index) for fault in kinds for index in range(num_variations)]
    rng.shuffle(attacks)
    cases = make_cases(num_streams, num_tokens=_NUM_TOKENS, seed=seed + 1)
    with tempfile.TemporaryDirectory(prefix="triptych-") as name:
        folder = Path(name)
        write_distribution(folder / "installed")
        keys = folder / "keys.yaml"
        entries = [
            f"- {{name: {who}, role: client, tenant: {who}, key: {key}}}" for who, key in _KEYS.items()
        ]
        keys.write_text("\n".join(entries))
        keys.chmod(0o600)
        environment = {"PYTHONPATH": str(folder / "installed"), FOLDER_VARIABLE: str(folder)}
        flags = [f"--data-parallel-size={_NUM_ENGINES}", *([f"--api-keys={keys}"] if has_keys else [])]
        async with (
            ServedStack(folder, flags, environment) as stack,
            _channel(stack, "legal") as channel,
            _channel(stack, "hostile") as hostile,
        ):
            undisturbed = Load(label="undisturbed")
            undisturbed.send(channel, cases)
            oracle = Oracle(await undisturbed.finish())
            flow, load = Flow(channel, cases, "legal"), Load(label="hostile")
            async with flow.running(num_streams, finds_engines=False):
                await flow.begin_more(num_streams)
                for fault, index in attacks:
                    [record] = load.send(hostile, [_variation(fault, index if has_keys else index % 3, rng)])
                    await load.ended(record)
                num_ready = await _until_ready(channel)
                await flow.begin_more(num_streams)
            ends = Counter(record.reason or str(record.code and record.code.name) for record in load.records)
            violations = oracle.violations(flow.load.records)
            return {
                "round": seed,
                "requests": len(attacks),
                "deaths": sum(strikes(folder, fault) for fault in _DEADLY),
                "ends": ", ".join(f"{reason} {count}" for reason, count in sorted(ends.items())),
                "legal_streams": len(flow.load.records),
                "legal_quarantined": sum(record.reason == QUARANTINED for record in flow.load.records),
                "differing": sum(violation.kind != "error" for violation in violations),
                "violations": len(violations),
                "first_violation": str(violations[0]) if violations else "",
                "engines": num_ready,
            }


def _channel(stack: ServedStack, who: str) -> grpc.aio.Channel:
    return open_channel(stack.address, profile="public", credentials=ChannelCredentials(api_key=_KEYS[who]))


def _variation(fault: EngineFault, index: int, rng: random.Random) -> Case:
    """The first of a kind, then others that sample in another way, continue, end or begin otherwise."""
    token_ids = [FIRST_PLAIN_ID + place for place in range(_NUM_PROMPT_TOKENS)]
    sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    kind = index % 6
    if kind == 1:
        sampling.max_tokens += index
    elif kind == 2:
        sampling.temperature, sampling.seed = 0.7, index
    elif kind == 3:
        token_ids += _plain(rng, index)
    elif kind == 4:
        token_ids[-index:] = _plain(rng, index)
    elif kind == 5:
        token_ids = _plain(rng, _NUM_PROMPT_TOKENS)
    token_ids[MARKER_POSITION] = fault.value
    return Case(index, make_cases(1)[0].kind, tuple(token_ids), sampling)


def _plain(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_PLAIN_ID, FIRST_MARKER_ID) for _ in range(count)]


async def _until_ready(channel: grpc.aio.Channel) -> int:
    """Wait until all engines are ready, or the limit; returns how many are."""
    models = model_pb2_grpc.ModelServiceStub(channel)
    for _ in range(round(_LIMIT_S / _POLL_S)):
        info = await models.GetServerInfo(model_pb2.GetServerInfoRequest(), timeout=_LIMIT_S)
        num_ready = [engine.state for engine in info.engines].count("ready")
        if num_ready == _NUM_ENGINES:
            break
        await asyncio.sleep(_POLL_S)
    return num_ready
