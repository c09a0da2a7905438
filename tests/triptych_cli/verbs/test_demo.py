"""The verb `demo`, as people run it."""

from __future__ import annotations

import asyncio
import re
import sys

from tests.processes import running_async
from tests.triptych_cli.fakes import children_of, triptych


async def test_the_demo_answers_with_its_own_model_shows_its_trace_and_stops_everything() -> None:
    words = "--help me with a story about a cat and a key."
    outcome = await triptych("demo", f"--prompt={words}", environment={"TRIPTYCH_ENGINE_MODEL": "/no-such"})
    assert outcome.exit_code == 0, outcome.out + outcome.err
    assert outcome.out.splitlines()[-1].startswith("OK:")
    assert f"> {words}" in outcome.out
    pids = re.search(r"pids +coordinator-0 (\d+), engine-0 (\d+), frontend-0 (\d+)", outcome.out)
    assert pids is not None
    assert len(set(pids.groups())) == 3
    for span in ("text_completion", "  tokenize", "  queue", "  prefill", "  decode", "  detokenize"):
        assert re.search(rf"^  {span} .* ms$", outcome.out, re.MULTILINE)


async def test_an_interrupted_demo_fails_and_stops_everything() -> None:
    outcome = await triptych("demo", interrupt_after=b"coordinator-0 READY")
    assert outcome.exit_code == 1
    assert outcome.out.splitlines()[-1] == "FAILED: interrupted"
    assert not children_of(outcome.pid, "")


async def test_a_demo_whose_engine_cannot_start_fails_and_says_why() -> None:
    outcome = await triptych("demo", environment={"TRIPTYCH_ENGINE_MAX_NUM_SEQS": "0"})
    assert outcome.exit_code == 1
    assert "FAILED: engine-0 (pid " in outcome.out
    assert "--max-num-seqs is 0" in outcome.out
    assert not children_of(outcome.pid, "")


async def test_loopback_that_is_down_is_brought_up() -> None:
    """In a network namespace of its own there is no loopback until it is set up."""
    program = (
        "import socket; from triptych_cli.serve.loopback import ensure_loopback;"
        "ensure_loopback(); ensure_loopback();"
        "server = socket.create_server(('127.0.0.1', 0)); socket.create_connection(server.getsockname());"
        "print('up')"
    )
    async with running_async(
        *("unshare", "--map-root-user", "--net", sys.executable, "-c", program),
        stdout=asyncio.subprocess.PIPE,
    ) as process:
        out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert out == b"up\n"
