"""A real Prometheus over a run with aborts, refusals and a killed engine has what the client counts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import grpc
import pytest
import pytest_asyncio
import yaml

from benchmarks.rig.processes import LOOPBACK, free_port
from tests.architecture.sources import ROOT
from tests.chaos.fault_plugin import FOLDER_VARIABLE, MARKER_POSITION, EngineFault, write_distribution
from tests.chaos.served import ServedStack
from tests.processes import running_async
from tests.system.test_observability import panels, rules
from triptych_client.aio import Client
from triptych_client.errors import TriptychError
from triptych_client.events import Delta, Finished, Started
from triptych_client.retry import RetryPolicy
from triptych_kit.addresses import join_address
from triptych_kit.http.admin_http import read_page

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.asyncio(loop_scope="module"),
]

_SCRAPE_S = 0.25
_LIMIT_S = 60.0
_MAX_ROWS = 8  # of an engine, so that a queue is there
_NUM_AT_A_TIME = 24
_PROMPT_TOKENS = range(MARKER_POSITION + 1, 40)
_PLAIN_IDS = range(100, 2000)
_MORE_THAN_FIT = 20_000  # tokens of a prompt
_NUM_NAN = 3


@dataclass(slots=True)
class Counted:
    """What the client has counted of its requests, under the names of the metrics."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    aborted: Counter[str] = field(default_factory=Counter)


class Prometheus:
    """A Prometheus that scrapes a stack."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """The labels and the value of each series of an instant query."""
        target = f"/api/v1/query?query={quote(expression)}"
        answer = json.loads(await read_page(self._address, target, limit_s=10.0))
        assert answer["status"] == "success", answer
        return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

    async def sums(self, metric: str, label: str) -> dict[str, float]:
        """The sums of a metric by a label, without those that are 0."""
        found = await self.query(f"sum by ({label}) ({metric})")
        return {labels.get(label, ""): value for labels, value in found if value}

    async def until(self, expression: str) -> None:
        """Wait until the expression has a value other than 0."""
        async with asyncio.timeout(_LIMIT_S):
            while True:
                # It refuses connections until it has started.
                with contextlib.suppress(OSError):
                    if any(value for _, value in await self.query(expression)):
                        return
                await asyncio.sleep(_SCRAPE_S)

    async def until_scraped(self) -> None:
        """Wait until what has happened so far is in it, from all services."""
        await self.until("sum(triptych_frontend_requests_open) == bool 0")
        await self.until(f"min(timestamp(triptych_build_info)) > bool {time.time() + _SCRAPE_S}")


@dataclass(frozen=True, slots=True)
class Watched:
    """A stack, the Prometheus that scrapes it, and what the client of the run has counted."""

    stack: ServedStack
    prometheus: Prometheus
    counted: Counted


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def watched(
    tmp_path_factory: pytest.TempPathFactory, prometheus_package: None
) -> AsyncIterator[Watched]:
    """Two engines, after a run in which one of them was killed and came back."""
    folder = tmp_path_factory.mktemp("prometheus")
    write_distribution(folder)
    flags = ("-dp", "2", f"--max-num-seqs={_MAX_ROWS}", "--kv-cache-metrics")
    environment = {"PYTHONPATH": str(folder), FOLDER_VARIABLE: str(folder)}
    async with ServedStack(folder, flags, environment) as stack, _scraping(stack, folder) as prometheus:
        await prometheus.until('sum(triptych_frontend_engine_state{state="ready"}) == bool 2')
        async with Run(stack.address) as run:
            await run.mixed(200)
            await run.around_a_kill(stack, prometheus)
            await run.mixed(100)
            await run.cancelled_in_the_queue(6)
            await run.with_nan(_NUM_NAN)
        await prometheus.until_scraped()
        yield Watched(stack, prometheus, run.counted)


@contextlib.asynccontextmanager
async def _scraping(stack: ServedStack, folder: Path) -> AsyncIterator[Prometheus]:
    # All processes, at the one port that a scraper reaches.
    targets = f"http://{stack.http}/metrics/targets"
    config = folder / "prometheus.yml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": f"{round(_SCRAPE_S * 1000)}ms", "evaluation_interval": "1s"},
                "rule_files": [str(ROOT / "deploy" / "alerts.yml")],
                "scrape_configs": [{"job_name": "triptych", "http_sd_configs": [{"url": targets}]}],
            }
        )
    )
    address = join_address(LOOPBACK, free_port())
    with (folder / "prometheus.log").open("wb") as log:
        async with running_async(
            *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address={address}",
            stdout=log,
            stderr=log,
        ):
            yield Prometheus(address)


class Run:
    """Requests by the Python client, each counted as its client sees it."""

    def __init__(self, address: str) -> None:
        self.counted = Counted()
        # A call that is made again would be a further request.
        self._client = Client(address, retry=RetryPolicy(max_attempts=1))
        self._rng = random.Random(32)
        self._num_ids = 0

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.close()

    async def mixed(self, num_requests: int) -> None:
        """Finished, aborted and refused ones."""
        slots = asyncio.Semaphore(_NUM_AT_A_TIME)

        async def one(number: int) -> None:
            async with slots:
                if number % 10 == 3:
                    await self._refused("temperature")
                elif number % 10 == 6:
                    await self._refused("prompt")
                elif number % 10 == 9:
                    await self._aborted()
                else:
                    await self._finished(self._rng.randrange(1, 16), n=1 + number % 2)

        await asyncio.gather(*map(one, range(num_requests)))

    async def around_a_kill(self, stack: ServedStack, prometheus: Prometheus) -> None:
        """Requests during which an engine dies; returns when it is back."""
        victim = stack.pids()["engine-0"]
        running = asyncio.gather(*(self._finished(120, n=2) for _ in range(_NUM_AT_A_TIME)))
        now = f"timestamp(triptych_engine_requests_running) > bool {time.time()}"
        await prometheus.until(f"min((triptych_engine_requests_running > bool 1) * ({now}))")
        os.kill(victim, signal.SIGKILL)
        await running
        await prometheus.until("sum(changes(process_start_time_seconds[5m]))")
        await prometheus.until('sum(triptych_frontend_engine_state{state="ready"}) == bool 2')

    async def cancelled_in_the_queue(self, num_requests: int) -> None:
        """Requests whose client leaves before anything is computed: what it does not read it cannot count."""
        before = [asyncio.ensure_future(self._finished(120)) for _ in range(3 * _MAX_ROWS)]
        await asyncio.gather(*(self._cancelled() for _ in range(num_requests)))
        await asyncio.gather(*before)

    async def with_nan(self, num_requests: int) -> None:
        """Requests with rows whose logits are NaN."""
        for _ in range(num_requests):
            prompt = self._prompt()
            prompt[MARKER_POSITION] = EngineFault.NAN.value
            self._count_sent(prompt)
            await self._read(self._client.generate(prompt, max_tokens=4))

    async def _finished(self, max_tokens: int, n: int = 1) -> None:
        prompt = self._prompt()
        self._count_sent(prompt)
        options = {"seed": self._rng.randrange(1000), "n": n, "ignore_eos": max_tokens > 100}
        await self._read(self._client.generate(prompt, max_tokens=max_tokens, **options))

    async def _aborted(self) -> None:
        prompt, request_id = self._prompt(), self._next_id()
        self._count_sent(prompt)
        self.counted.aborted["request"] += 1
        stream = self._client.generate(prompt, max_tokens=450, ignore_eos=True, request_id=request_id)
        await self._read(stream, abort=request_id)

    async def _cancelled(self) -> None:
        prompt, request_id = self._prompt(), self._next_id()
        self._count_sent(prompt)
        self.counted.aborted["client"] += 1
        self.counted.finished["abort"] += 1
        async with (
            self._client.generate(prompt, max_tokens=50, request_id=request_id),
            asyncio.timeout(_LIMIT_S),
        ):
            while True:
                with contextlib.suppress(TriptychError):
                    status = await self._client.get_request(request_id)
                    assert status.usage.num_completion_tokens == 0
                    # At an engine: what it has not been sent to has no prompt tokens yet.
                    if status.engine_id:
                        return
                await asyncio.sleep(0.01)

    async def _refused(self, what: str) -> None:
        self.counted.requests += 1
        prompt = self._prompt()
        options = {"temperature": 3.0} if what == "temperature" else {"temperature": 1.0}
        if what == "prompt":
            prompt *= 1 + _MORE_THAN_FIT // len(prompt)
        with pytest.raises(TriptychError) as raised:
            await self._read(self._client.generate(prompt, max_tokens=4, **options))
        assert raised.value.status is grpc.StatusCode.INVALID_ARGUMENT
        self.counted.errors[raised.value.status.name] += 1

    async def _read(self, stream, abort: str = "") -> None:
        async with stream:
            async for event in stream:
                match event:
                    case Started():
                        pass
                    case Delta():
                        self.counted.generated_tokens += len(event.token_ids)
                        if abort:
                            await self._client.abort(abort)
                            abort = ""
                    case Finished():
                        self.counted.finished[event.reason] += 1

    def _count_sent(self, prompt: list[int]) -> None:
        self.counted.requests += 1
        self.counted.prompt_tokens += len(prompt)

    def _prompt(self) -> list[int]:
        return self._rng.choices(_PLAIN_IDS, k=self._rng.choice(_PROMPT_TOKENS))

    def _next_id(self) -> str:
        self._num_ids += 1
        return f"prometheus-{self._num_ids}"


async def test_its_counters_equal_what_the_client_has_counted(watched: Watched) -> None:
    prometheus, counted = watched.prometheus, watched.counted
    assert counted.requests > 300
    assert set(counted.finished) == {"length", "stop", "abort", "error"}
    sums = {
        name: await prometheus.sums(f"triptych_frontend_{name}_total", label)
        for name, label in (
            ("requests", ""),
            ("prompt_tokens", ""),
            ("generated_tokens", ""),
            ("outputs_finished", "finished_reason"),
            ("request_errors", "code"),
            ("requests_aborted", "cause"),
        )
    }
    assert sums == {
        "requests": {"": counted.requests},
        "prompt_tokens": {"": counted.prompt_tokens},
        "generated_tokens": {"": counted.generated_tokens},
        "outputs_finished": dict(counted.finished),
        "request_errors": dict(counted.errors),
        "requests_aborted": dict(counted.aborted),
    }


async def test_the_names_of_vllm_have_the_same_values(watched: Watched) -> None:
    prometheus, counted = watched.prometheus, watched.counted
    assert await prometheus.sums("vllm:request_success_total", "finished_reason") == dict(counted.finished)
    assert await prometheus.sums("vllm:generation_tokens_total", "") == {"": counted.generated_tokens}
    assert await prometheus.sums("vllm:prompt_tokens_total", "") == {"": counted.prompt_tokens}


async def test_requests_moved_from_the_engine_that_was_killed(watched: Watched) -> None:
    moved = await watched.prometheus.sums("triptych_frontend_requests_moved_total", "cause")
    assert sum(moved.values()) > 0
    starts = await watched.prometheus.query("changes(process_start_time_seconds[5m]) > 0")
    assert [(labels["instance"], value) for labels, value in starts] == [("engine-0", 1)]


async def test_each_row_with_nan_is_counted_once(watched: Watched) -> None:
    assert await watched.prometheus.sums("triptych_engine_nan_rows_total", "") == {"": _NUM_NAN}


async def test_promtool_finds_nothing_but_the_colons_of_aliases(watched: Watched) -> None:
    for process in watched.stack.processes():
        page = (await read_page(process["admin_http"], "/metrics", limit_s=10.0)).decode()
        own = "\n".join(line for line in page.splitlines() if not _is_alias(line)) + "\n"
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=own, capture_output=True, text=True, timeout=60
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def _is_alias(line: str) -> bool:
    name = line.split()[2] if line.startswith("# ") else line
    return name.startswith("vllm:")


# Of this run: engines apart, spans to no collector, no alert.
_EMPTY = {"operators: Ranks in step", "operators: Whole request, with traces", "operators: Alerts"}


async def test_every_panel_shows_something(watched: Watched) -> None:
    empty = set()
    for where, expression in panels():
        if not await watched.prometheus.query(expression.replace("[1m]", "[5m]")):
            empty.add(where)
    assert empty <= _EMPTY


async def test_no_alert_fires(watched: Watched) -> None:
    assert await watched.prometheus.query('ALERTS{alertstate="firing"}') == []
    for _, expression in rules():
        await watched.prometheus.query(expression)
