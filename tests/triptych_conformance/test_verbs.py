"""`triptych conformance engine`: what it prints, and its exit codes."""

from __future__ import annotations

import json

from tests.contract.scripted_engine import ScriptedEngine
from tests.contract.test_engines import serving
from tests.contract.wrong_engines import WRONG_ENGINES
from tests.triptych_cli.fakes import triptych


async def test_the_report_is_text_by_section() -> None:
    async with serving(ScriptedEngine()) as address:
        outcome = await triptych("conformance", "engine", address, "--only", "no_hello", "--only", "goodbye")
    assert (outcome.exit_code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith(f"engine {address}: scripted")
    assert [line for line in lines if line[:1].isdigit()][:2] == ["3. Opening a session", "10. Ends"]
    assert lines[-1].startswith("2 kept, 0 finding, 0 warning, 0 not applicable")


async def test_a_finding_exits_1_and_json_has_what_was_expected_and_seen() -> None:
    case, wrong_engine = WRONG_ENGINES[0]
    async with serving(wrong_engine()) as address:
        outcome = await triptych("conformance", "engine", f"grpc://{address}", "--only", case, "--json")
    report = json.loads(outcome.out)
    assert outcome.exit_code == 1
    assert report["totals"] == {"KEPT": 0, "FINDING": 1, "WARNING": 0, "NOT_APPLICABLE": 0}
    assert report.keys() == {"peer", "duration_s", "totals", "cases"}
    (finding,) = report["cases"]
    assert finding.keys() == {"section", "name", "level", "rule", "outcome", "detail", "duration_s"}
    assert (finding["name"], finding["level"], finding["outcome"]) == (case, "MUST", "FINDING")
    assert finding["detail"].startswith("expected ")


async def test_the_command_of_drain_is_run_and_its_case_is_the_last() -> None:
    async with serving(ScriptedEngine()) as address:
        outcome = await triptych(
            *("conformance", "engine", address, "--only", "drain", "--drain", "true", "--patience-s", "0.5")
        )
    # This command drains nothing.
    assert outcome.exit_code == 1
    assert "expected draining" in outcome.out


async def test_a_command_that_fails_is_a_finding() -> None:
    async with serving(ScriptedEngine()) as address:
        outcome = await triptych("conformance", "engine", address, "--only", "death", "--restart", "exit 3")
    assert outcome.exit_code == 1
    assert "expected exit status 0 of `exit 3`; seen: 3" in outcome.out


async def test_an_engine_that_cannot_be_reached_exits_1() -> None:
    outcome = await triptych("conformance", "engine", "127.0.0.1:1")
    assert outcome.exit_code == 1
    assert "no session could be opened" in outcome.err
    assert "UNAVAILABLE" in outcome.err


async def test_mistakes_exit_2() -> None:
    outcome = await triptych("conformance", "engine", "127.0.0.1:1", "--only", "no_such_case")
    assert (outcome.exit_code, outcome.err.strip()) == (
        2,
        "triptych conformance: no case no_such_case",
    )
    outcome = await triptych("conformance", "engine", "nowhere")
    assert outcome.exit_code == 2
    assert "not an address" in outcome.err


async def test_a_frontend_that_does_not_come_exits_1() -> None:
    flags = ("--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--frontend", "127.0.0.1:1")
    outcome = await triptych("conformance", "frontend", *flags, "--patience-s", "0.2")
    assert outcome.exit_code == 1
    assert "expected a session at each engine" in outcome.err


async def test_the_kit_plays_two_engines() -> None:
    flags = ("--listen", "127.0.0.1:0", "--frontend", "127.0.0.1:1")
    outcome = await triptych("conformance", "frontend", *flags)
    assert outcome.exit_code == 2
    assert "--listen is given 1 times, not 2" in outcome.err
