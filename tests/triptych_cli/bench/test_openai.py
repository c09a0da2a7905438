"""`bench serve --backend openai`: what it sends to another server, and what it notes of the answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.triptych_cli.bench.fakes import OpenAIServer, serving_openai
from tests.triptych_cli.fakes import triptych
from triptych_cli.bench.config import BenchServeConfig
from triptych_kit.config import ConfigError, load_config

SMALL = ("bench", "serve", "--backend=openai", "--num-requests=4", "--input-len=8", "--output-len=6")


async def test_a_server_of_openai_is_measured(tmp_path: Path) -> None:
    path, server = tmp_path / "figures.json", OpenAIServer()
    async with serving_openai(server) as base:
        outcome = await triptych(
            *SMALL, f"--base-url={base}/v1", "--model=b", "--temperature=0", f"--json={path}",
            environment={"TRIPTYCH_API_KEY": "triptych-0123456789abcdef"},
        )  # fmt: skip
    assert (outcome.exit_code, outcome.err) == (0, "")
    figures = json.loads(path.read_text())
    assert figures["model"] == "b"
    summary = figures["summary"]
    assert (summary["num_completed"], summary["num_output_tokens"], summary["num_cached_tokens"]) == (
        4,
        24,
        8,
    )
    assert [each["num_output_tokens"] for each in figures["requests"]] == [6] * 4
    # The warm-up is the first one; what is over leaves its connection to others.
    assert len(server.bodies) == 5
    assert server.num_connections <= 4
    assert sorted(body["seed"] for body in server.bodies[1:]) == [0, 1, 2, 3]
    for body in server.bodies:
        assert (body["model"], body["max_tokens"], body["temperature"]) == ("b", 6, 0)
        assert (body["stream"], body["ignore_eos"]) == (True, True)
        assert all(8 <= token_id < 1000 for token_id in body["prompt"])
    assert all(b"authorization: Bearer triptych-0123456789abcdef\r\n" in head for head in server.heads)


async def test_a_refusal_and_an_early_end_are_failures() -> None:
    async with serving_openai(OpenAIServer(refused=frozenset({2}))) as base:
        outcome = await triptych(*SMALL, f"--base-url={base}")
    assert outcome.exit_code == 1
    assert "failed with HTTP_429: 1, e.g. one too many" in outcome.out
    async with serving_openai(OpenAIServer(ends_early=True)) as base:
        outcome = await triptych(*SMALL, f"--base-url={base}", "--warmup=0")
    assert outcome.exit_code == 1
    assert "failed with INCOMPLETE: 4" in outcome.out


async def test_a_turn_goes_on_from_the_ids_of_the_answer() -> None:
    server = OpenAIServer(has_ids=True)
    async with serving_openai(server) as base:
        outcome = await triptych(
            *(*SMALL, f"--base-url={base}", "--warmup=0", "--dataset=multi-turn", "--turn-len=2", "--turns=4")
        )
    assert outcome.exit_code == 0
    assert all(body["return_token_ids"] for body in server.bodies)
    first, second = (body["prompt"] for body in server.bodies[:2])
    assert second[: len(first) + 5] == [*first, *[9] * 5]


async def test_what_is_not_there_is_named() -> None:
    async with serving_openai(OpenAIServer()) as base:
        outcome = await triptych(*SMALL, f"--base-url={base}", "--model=c")
        too_long = await triptych(*SMALL, f"--base-url={base}", "--model=b", "--input-len=195")
    assert outcome.exit_code == 1
    assert f"model 'c' is not served at {base}; served: a, b" in outcome.err
    assert (too_long.exit_code, "201 tokens, the model takes 200" in too_long.err) == (2, True)
    nothing = await triptych(*SMALL, "--base-url=http://127.0.0.1:1")
    assert nothing.exit_code == 1
    assert "http://127.0.0.1:1 answers UNAVAILABLE: " in nothing.err


async def test_the_key_may_be_openais_and_one_that_is_refused_is_named() -> None:
    server = OpenAIServer(key=b"Bearer sk-right")
    async with serving_openai(server) as base:
        outcome = await triptych(
            *SMALL, f"--base-url={base}", environment={"TRIPTYCH_API_KEY": "", "OPENAI_API_KEY": "sk-right"}
        )
        assert (outcome.exit_code, outcome.err) == (0, "")
        for key, whose in (("", "is not set"), ("sk-wrong", "is not accepted")):
            outcome = await triptych(*SMALL, f"--base-url={base}", environment={"OPENAI_API_KEY": key})
            sentence = f"the key, TRIPTYCH_API_KEY or else OPENAI_API_KEY, {whose}"
            assert (outcome.exit_code, outcome.err) == (1, f"UNAUTHENTICATED: {base}: no key; {sentence}\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--backend=openai", "--url=grpc://h:1"], "--url is grpc://h:1, which is of --backend triptych"),
        (["--base-url=http://h:1"], "--base-url is http://h:1, which is of --backend openai"),
        (["--backend=openai", "--base-url=h:1"], "--base-url is h:1, not a URL such as"),
        (["--backend=openai", "--no-detokenize"], "--detokenize is False, which is of --backend triptych"),
        (
            ["--backend=vllm"],
            "'vllm' is not one of triptych, openai; any server .*--backend openai with --base-url",
        ),
    ],
)
def test_options_of_the_other_backend_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(BenchServeConfig, flags, service="bench")
