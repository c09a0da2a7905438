"""The verb `complete` against a frontend of scripted answers."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from tests.triptych_cli.conftest import RunHere
from tests.triptych_cli.fakes import fake_frontend, triptych
from triptych_cli.verbs.complete import Completion, SamplingValue, request_of
from triptych_cli.verbs.failures import Target, print_failure
from triptych_kit.errors import InvalidArgument, ServiceError, Unavailable
from triptych_kit.limits import INTERNAL
from triptych_kit.server import Server

NO_STATS = {"queue_ms": 0, "prefill_ms": 0, "decode_ms": 0, "num_preemptions": 0, "num_migrations": 0}


def completion(
    prompt: str | None = "hi", ids: str | None = None, **sampling: SamplingValue | None
) -> Completion:
    return Completion(
        url="grpc://127.0.0.1:1",
        prompt=prompt,
        prompt_token_ids=ids,
        model="",
        request_id="",
        sampling=sampling,
        as_json=False,
        stream=False,
        timeout_s=None,
    )


async def test_plain_mode_prints_the_text() -> None:
    async with fake_frontend() as served:
        outcome = await triptych("complete", "--url", served.url, "--prompt", "hi")
    assert (outcome.exit_code, outcome.out) == (0, "hello world\n")
    assert served.frontend.requests[0].prompt == "hi"


async def test_the_prompt_is_an_argument_or_comes_on_stdin() -> None:
    async with fake_frontend() as served:
        url = served.url.replace("grpc://", "http://")
        argument = await triptych("complete", "--url", url, "Once upon a time")
        piped = await triptych("complete", "--url", url, stdin="Once upon a time\n")
    assert (argument.exit_code, argument.out) == (piped.exit_code, piped.out) == (0, "hello world\n")
    assert [request.prompt for request in served.frontend.requests] == ["Once upon a time"] * 2


async def test_several_outputs_are_printed_each_under_its_number() -> None:
    async with fake_frontend() as served:
        flags = ["--url", served.url, "hi", "--n", "3"]
        plain = await triptych("complete", *flags)
        as_json = await triptych("complete", *flags, "--json")
    assert plain.out == "[0]\nhello world 0\n[1]\nhello world 1\n[2]\nhello world 2\n"
    answer = json.loads(as_json.out)
    outputs = [(output["output_index"], output["text"]) for output in answer["outputs"]]
    assert outputs == [(index, f"hello world {index}") for index in range(3)]
    assert answer["usage"]["num_completion_tokens"] == 6


@pytest.mark.parametrize("flags", [["--logprobs", "2"], ["--prompt-logprobs", "1"], ["--stream"]])
def test_what_text_does_not_show_needs_json(run_here: RunHere, flags: list[str]) -> None:
    outcome = run_here("complete", "--url", "127.0.0.1:1", "hi", *flags)
    assert outcome.exit_code == 2
    assert outcome.err == f"triptych complete: {flags[0]} needs --json: text alone does not show its effect\n"


async def test_json_is_one_object_under_the_trace_that_the_server_received() -> None:
    async with fake_frontend() as served:
        outcome = await triptych("complete", "--url", served.url, "--prompt-token-ids", "7,8,9", "--json")
    [line] = outcome.out.splitlines()
    answer = json.loads(line)
    trace_id = answer.pop("trace_id")
    assert answer == {
        "request_id": "made-here",
        "prompt_token_ids": [7, 8, 9],
        "token_ids": [5, 6],
        "text": "hello world",
        "finish_reason": "stop",
        "stop_match": None,
        "prompt_logprobs": [],
        "logprobs": [],
        "cumulative_logprob": None,
        "error_message": "",
        "stats": NO_STATS,
        "outputs": [
            {
                "output_index": 0,
                "token_ids": [5, 6],
                "text": "hello world",
                "finish_reason": "stop",
                "stop_match": None,
                "logprobs": [],
                "cumulative_logprob": None,
                "error_message": "",
                "stats": NO_STATS,
            }
        ],
        "usage": {"num_prompt_tokens": 3, "num_cached_tokens": 0, "num_completion_tokens": 2},
    }
    assert re.fullmatch(r"[0-9a-f]{32}", trace_id)
    assert served.frontend.metadata[0]["traceparent"].split("-")[1] == trace_id


async def test_json_stream_is_one_object_an_event() -> None:
    async with fake_frontend() as served:
        outcome = await triptych("complete", "--url", served.url, "--prompt", "hi", "--json", "--stream")
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert [event["event"] for event in events] == ["started", "delta", "delta", "finished"]
    assert [event.get("text") for event in events] == [None, "hello", " world", None]
    assert events[-1]["finish_reason"] == "stop"


async def test_sampling_flags_are_the_fields_of_the_api_and_nothing_else_is_set() -> None:
    flags = ["--max-tokens", "3", "--temperature", "0", "--stop", "a,b", "--stop", "c", "--ignore-eos"]
    async with fake_frontend() as served:
        await triptych("complete", "--url", served.url, "--prompt", "hi", *flags)
    sampling = served.frontend.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, list(sampling.stop)) == (3, 0.0, ["a,b", "c"])
    assert sampling.ignore_eos
    assert {field.name for field, _ in sampling.ListFields()} == {
        "max_tokens",
        "temperature",
        "stop",
        "ignore_eos",
    }


@pytest.mark.parametrize(
    "flags", [["--stop-token-ids", "1,2,3"], ["--stop-token-ids=1", "--stop-token-ids", "2,3"]]
)
async def test_lists_of_ids_are_written_as_a_prompt_of_ids_is(flags: list[str]) -> None:
    async with fake_frontend() as served:
        outcome = await triptych("complete", "--url", served.url, "--prompt", "hi", *flags)
    assert outcome.exit_code == 0
    assert list(served.frontend.requests[0].sampling.stop_token_ids) == [1, 2, 3]


async def test_a_character_that_the_terminal_does_not_have_is_no_error() -> None:
    async with fake_frontend(text=" w\N{LATIN SMALL LETTER O WITH DIAERESIS}rld") as served:
        arguments = ["complete", "--url", served.url, "--prompt", "hi"]
        outcome = await triptych(*arguments, environment={"PYTHONIOENCODING": "ascii"})
    assert (outcome.exit_code, outcome.out) == (0, "hello w?rld\n")


async def test_an_interrupt_cancels_the_request() -> None:
    async with fake_frontend(hangs=True) as served:
        outcome = await triptych("complete", "--url", served.url, "--prompt", "hi", interrupt_after=b"hello")
        assert outcome.exit_code == 130
        await asyncio.wait_for(served.frontend.cancelled.wait(), 30)


async def test_a_refusal_exits_1_with_one_sentence_that_names_the_flag() -> None:
    async with fake_frontend() as served:
        outcome = await triptych("complete", "--url", served.url, "--prompt", "hi", "--temperature", "3")
    assert (outcome.exit_code, outcome.out) == (1, "")
    assert outcome.err.splitlines() == [
        "INVALID_ARGUMENT: --temperature is 3, the range is 0..2",
    ]


@pytest.mark.parametrize(
    ("arguments", "stdin"),
    [
        (["complete", "hi"], ""),
        (["chat"], "hi"),
        (["health"], ""),
    ],
)
async def test_a_server_that_is_not_there_exits_1_with_what_to_do(arguments: list[str], stdin: str) -> None:
    outcome = await triptych(*arguments, "--url", "grpc://127.0.0.1:1", stdin=stdin)
    assert outcome.exit_code == 1
    assert outcome.err == (
        "no server answers at 127.0.0.1:1: is `triptych serve` running? --url names another address\n"
    )


@pytest.mark.parametrize(
    ("arguments", "stdin"), [(["complete", "hi"], ""), (["chat"], "hi"), (["bench", "serve"], "")]
)
async def test_a_service_that_is_no_frontend_exits_1_with_what_to_do(
    arguments: list[str], stdin: str
) -> None:
    server = Server(
        listen="127.0.0.1:0", registrations=[], profile=INTERNAL, service="engine", reflection=False
    )
    address = await server.start()
    try:
        outcome = await triptych(*arguments, "--url", f"grpc://{address}", stdin=stdin)
    finally:
        await server.stop(0)
    assert outcome.exit_code == 1
    assert outcome.err == (
        f"{address} is no frontend: an engine, a coordinator or an admin listener does not answer this;"
        " --url takes the address that `triptych serve` shows as gRPC\n"
    )


async def test_a_deadline_that_passes_is_reported_with_its_flag() -> None:
    async with fake_frontend(hangs=True) as served:
        outcome = await triptych("complete", "--url", served.url, "hi", "--timeout-s", "0.5")
    assert outcome.exit_code == 1
    address = served.url.removeprefix("grpc://")
    assert outcome.err == f"no complete answer from {address} within 0.5 s, see --timeout-s\n"


async def test_an_address_that_is_none_is_refused_by_its_flag() -> None:
    outcome = await triptych("complete", "--url", "ftp://host:1", "hi")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("INVALID_ARGUMENT: --url: 'ftp://host:1' is not an address")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            Unavailable("no engine is ready", reason="NO_ENGINE_READY"),
            "UNAVAILABLE (NO_ENGINE_READY): no engine",
        ),
        (Unavailable("no route"), "UNAVAILABLE: no route"),
    ],
)
def test_the_reason_is_shown_where_it_is_more_than_the_name_of_the_code(
    error: ServiceError, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_failure(error, Target("h:1"))
    assert capsys.readouterr().err.startswith(text)


def test_unset_sampling_stays_unset() -> None:
    request = request_of(completion(seed=None, top_k=5))
    assert not request.sampling.HasField("seed")
    assert request.sampling.top_k == 5


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (completion(prompt=None, ids="1,x"), "token_ids.ids"),
        (completion(prompt=None, ids="-1"), "token_ids.ids"),
        (completion(seed=-1), "sampling.seed"),
        (completion(stop_token_ids=["1,x"]), "sampling.stop_token_ids"),
    ],
)
def test_what_no_request_can_hold_is_refused_by_field(wrong: Completion, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        request_of(wrong)
    assert [name for name, _ in refused.value.violations] == [field]
