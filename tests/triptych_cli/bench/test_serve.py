"""The verb `bench serve` as people run it: tables, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.triptych_cli.bench.fakes import VOCAB_SIZE, CountingFrontend, serving
from tests.triptych_cli.conftest import RunHere
from tests.triptych_cli.fakes import triptych

SMALL = ("--num-requests=4", "--input-len=8", "--output-len=6")


async def test_figures_are_shown_and_written(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    frontend = CountingFrontend()
    async with serving(frontend) as address:
        outcome = await triptych(
            "bench", "serve", f"--url=grpc://{address}", *SMALL, "--slo=e2e_ms=100000", f"--json={path}"
        )
    assert (outcome.exit_code, outcome.err) == (0, "")
    for shown in (
        "completed requests",
        "TTFT, time to first token",
        "TPOT",
        "ITL",
        "p99",
        "sent late",
        "good requests a second",
    ):
        assert shown in outcome.out
    figures = json.loads(path.read_text())
    summary = figures["summary"]
    assert (figures["model"], figures["settings"]["rate"]) == ("fake", "inf")
    assert (summary["num_completed"], summary["num_output_tokens"], summary["num_cached_tokens"]) == (
        4,
        24,
        4,
    )
    assert summary["goodput_requests_per_s"] == summary["requests_per_s"] > 0
    assert set(summary["ttft_ms"]) == {"mean", "median", "p90", "p99", "std", "min", "max"}
    assert [each["num_output_tokens"] for each in figures["requests"]] == [6, 6, 6, 6]


async def test_ids_are_of_the_vocabulary_the_warm_up_is_not_counted_and_connections_are_real_ones() -> None:
    frontend = CountingFrontend()
    # The address by its former flag, and as that of HTTP.
    flags = (*SMALL, "--warmup=3", "--connections=3")
    async with serving(frontend) as address:
        outcome = await triptych("bench", "serve", f"--address=http://{address}", *flags)
    assert (outcome.exit_code, outcome.err) == (0, "")
    assert len(frontend.peers) == 3
    assert len(frontend.requests) == 7
    assert all(each < VOCAB_SIZE - 1 for request in frontend.requests for each in request.token_ids.ids)
    assert all(request.sampling.ignore_eos for request in frontend.requests)


async def test_a_failed_request_makes_exit_code_1_unless_failures_are_allowed() -> None:
    async with serving(CountingFrontend(refused=frozenset({2}))) as address:
        outcome = await triptych("bench", "serve", f"--url={address}", *SMALL)
    assert outcome.exit_code == 1
    assert "failed with RESOURCE_EXHAUSTED: 1, e.g. request 2 is one too many" in outcome.out
    async with serving(CountingFrontend(refused=frozenset({2}))) as address:
        outcome = await triptych("bench", "serve", f"--url={address}", *SMALL, "--allow-failures")
    assert outcome.exit_code == 0


async def test_a_failed_warm_up_ends_it() -> None:
    frontend = CountingFrontend(refused=frozenset({0}))
    async with serving(frontend) as address:
        outcome = await triptych("bench", "serve", f"--url={address}", *SMALL)
    assert (outcome.exit_code, outcome.err) == (
        1,
        "RESOURCE_EXHAUSTED: warm-up: request 0 is one too many\n",
    )
    assert len(frontend.requests) == 1


async def test_a_length_that_the_model_cannot_hold_is_refused_before_anything_is_sent() -> None:
    frontend = CountingFrontend()
    async with serving(frontend) as address:
        outcome = await triptych("bench", "serve", f"--url={address}", "--input-len=195", "--output-len=6")
    assert outcome.exit_code == 2
    assert "201 tokens, the model takes 200" in outcome.err
    assert frontend.requests == []


async def test_a_server_that_is_not_there_is_exit_code_1() -> None:
    outcome = await triptych("bench", "serve", "--url=127.0.0.1:1")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("no server answers at 127.0.0.1:1: is `triptych serve` running?")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--slo=p99=3", "slo 'p99=3' is not one of"),
        ("--num-request=3", "did you mean --num-requests?"),
        ("--url=nowhere", "not an address"),
        ("--num-requests=0", "--num-requests is 0, the least is 1"),
        ("--warmup=-1", "--warmup is -1, the least is 0"),
        ("--json=/no/such/folder/a.json", "/no/such/folder/a.json"),
    ],
)
def test_bad_options_are_exit_code_2(run_here: RunHere, flag: str, message: str) -> None:
    outcome = run_here("bench", "serve", flag)
    assert outcome.exit_code == 2
    assert message in outcome.err


async def test_an_interrupt_shows_what_there_is(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    frontend = CountingFrontend(hangs=True, waits_for_peers=4)
    async with serving(frontend) as address:
        outcome = await triptych(
            *("bench", "serve", f"--url={address}", *SMALL, "--warmup=0", f"--json={path}"),
            interrupt_when=frontend.all_there,
        )
    assert outcome.exit_code == 130
    assert outcome.out.startswith("interrupted: 0 of 4 requests were completed\n")
    assert "interrupted requests" in outcome.out
    assert json.loads(path.read_text())["summary"]["num_interrupted"] == 4


def test_help_lists_the_options(run_here: RunHere) -> None:
    outcome = run_here("bench", "serve", "--help")
    assert outcome.exit_code == 0
    for flag in ("--burstiness", "--range-ratio", "--[no-]ignore-eos", "--slo", "--[no-]allow-failures"):
        assert flag in outcome.out
