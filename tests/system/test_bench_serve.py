"""`triptych bench serve` reports what an independent observer of the same run sees."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import numpy as np
import pytest

from service_kit.clock import MonotonicClock
from service_kit.loop_lag import LoopLag
from tests.system.recording_proxy import Recording, RecordingProxy
from tests.system.stack import Stack, address_of
from triptych.api.v1 import generate_pb2

TOLERANCE = 0.03
NUM_REQUESTS = 24
RUN_LIMIT_S = 240.0
FLAGS = {
    "random": ("--input-len=96", "--output-len=24", "--range-ratio=0.3", "--rate=4", "--connections=3"),
    "multi-turn": ("--turns=3", "--turn-len=32", "--output-len=16", "--concurrency=4", "--connections=2"),
}


@pytest.mark.parametrize("dataset", FLAGS)
async def test_figures_are_those_of_a_proxy_in_front_of_the_server(dataset, slow_llama, tmp_path):
    path = tmp_path / "figures.json"
    flags = [f"--dataset={dataset}", f"--num-requests={NUM_REQUESTS}", "--temperature=0", f"--json={path}"]
    async with Stack() as stack:
        trio = await stack.start_all(slow_llama, "--num-threads=1", "--max-model-len=512")
        async with RecordingProxy(address_of(trio.frontend)) as proxy:
            lag = LoopLag(MonotonicClock(), window_s=RUN_LIMIT_S)
            lag.start()
            out = await _bench_serve(f"--address={proxy.address}", *flags, *FLAGS[dataset])
            lag.stop()
    print(out)
    figures = json.loads(path.read_text())
    # The first is the warm-up, which does not count.
    calls = proxy.of("Generate")[1:]
    assert len(calls) == NUM_REQUESTS
    assert len({each for call in calls for each in _Seen(call).token_ids}) >= 20
    # A message passes both processes, each of which may take it, and hand it on, as late as its timers came.
    delay_ms = 2 * (lag.summary().max_ms + figures["client_lag"]["max_ms"])
    _check_same(figures["summary"], [_Seen(call) for call in calls], delay_ms)
    assert {each["code"] for each in figures["requests"]} == {"OK"}
    assert len(proxy.peers) == figures["settings"]["connections"]
    if dataset == "multi-turn":
        _check_turns_append_answers(calls, num_turns=3)


async def _bench_serve(*arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "launcher.cli", "bench", "serve", *arguments),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    out, _ = await asyncio.wait_for(process.communicate(), RUN_LIMIT_S)
    assert process.returncode == 0
    return out.decode()


class _Seen:
    """What the proxy saw of one request, counted without any code of the load generator."""

    def __init__(self, call: Recording) -> None:
        self.began_at = call.request_at
        self.token_ids: list[int] = []
        self.token_times: list[float] = []
        self.ended_at = call.responses[-1][0]
        self.num_prompt = 0
        for at, content in call.responses:
            response = generate_pb2.GenerateResponse.FromString(content)
            if response.delta.token_ids:
                self.token_times.append(at)
                self.token_ids += response.delta.token_ids
            self.num_prompt += response.started.num_prompt_tokens
            self.num_cached = response.finished.usage.num_cached_tokens

    @property
    def times_ms(self) -> dict[str, float]:
        first, last = self.token_times[0], self.token_times[-1]
        return {
            "ttft_ms": 1000 * (first - self.began_at),
            "tpot_ms": 1000 * (last - first) / (len(self.token_ids) - 1),
            "e2e_ms": 1000 * (self.ended_at - self.began_at),
        }


def _check_same(summary: dict, seen: list[_Seen], delay_ms: float) -> None:
    """Counts are equal, times but for the tolerance and what a message may have waited between the two."""
    num_tokens = sum(len(each.token_ids) for each in seen)
    assert summary["num_completed"] == len(seen)
    assert summary["num_output_tokens"] == num_tokens
    assert summary["num_prompt_tokens"] == sum(each.num_prompt for each in seen)
    assert summary["num_cached_tokens"] == sum(each.num_cached for each in seen)
    assert summary["requests_per_s"] == pytest.approx(len(seen) / summary["duration_s"])
    assert summary["output_tokens_per_s"] == pytest.approx(num_tokens / summary["duration_s"])
    expected: dict[tuple[str, str], float] = {}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        values = np.array([each.times_ms[name] for each in seen])
        expected[name, "mean"] = values.mean()
        for quantile, percent in (("median", 50), ("p90", 90), ("p99", 99)):
            expected[name, quantile] = np.percentile(values, percent)
    gaps = np.concatenate([np.diff(each.token_times) * 1000 for each in seen])
    expected["itl_ms", "mean"] = gaps.mean()
    expected["itl_ms", "median"] = np.median(gaps)
    pairs = [(" ".join(keys), summary[keys[0]][keys[1]], theirs) for keys, theirs in expected.items()]
    duration_s = max(each.ended_at for each in seen) - min(each.began_at for each in seen)
    pairs.append(("duration in ms", 1000 * summary["duration_s"], 1000 * duration_s))
    print(f"delays of {delay_ms:.3f} ms at most")
    for name, ours, theirs in pairs:
        print(f"{name:16} ours {ours:10.3f} theirs {theirs:10.3f} {ours / theirs - 1:+.2%}")
    assert [name for name, ours, theirs in pairs if abs(ours - theirs) > TOLERANCE * theirs + delay_ms] == []


def _check_turns_append_answers(calls: list[Recording], num_turns: int) -> None:
    """Each prompt but a first one begins with an earlier prompt and all of its answer."""
    history: list[list[int]] = []
    first = 0
    for call in calls:
        prompt = list(generate_pb2.GenerateRequest.FromString(call.request).token_ids.ids)
        before = [each for each in history if prompt[: len(each)] == each]
        first += not before
        history.append(prompt + _Seen(call).token_ids)
    assert first == len(calls) / num_turns
