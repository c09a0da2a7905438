"""The verb `run-batch` against a frontend that answers each prompt with itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from service_kit.errors import InvalidArgument, ResourceExhausted
from service_kit.server import PUBLIC, Registration, Server
from tests.launcher.fakes import Outcome, triptych
from triptych.api.v1 import generate_pb2, inference_pb2, inference_pb2_grpc

WAIT_S = 60.0


@dataclass
class EchoFrontend(inference_pb2_grpc.InferenceServiceServicer):
    """Answers a prompt with itself; "bad" is refused, "hang" never answered, "busy" so many times too much.

    "first" waits until `first_waits_for` other prompts were answered, and all until `together` came at once.
    """

    num_busy: int = 0
    first_waits_for: int = 0
    together: int = 1
    prompts: list[str] = field(default_factory=list)
    num_answered: int = 0
    num_in_flight: int = 0
    max_in_flight: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    there: asyncio.Event = field(default_factory=asyncio.Event)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def GenerateUnary(
        self, request: inference_pb2.GenerateUnaryRequest, context: Any
    ) -> inference_pb2.GenerateUnaryResponse:
        """The prompt as output."""
        prompt = request.request.prompt
        self.prompts.append(prompt)
        self.num_in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.num_in_flight)
        if self.num_in_flight >= self.together:
            self.there.set()
        try:
            await self.there.wait()
            await self._wait(prompt)
        finally:
            self.num_in_flight -= 1
        self.num_answered += 1
        if self.num_answered >= self.first_waits_for:
            self.enough.set()
        return inference_pb2.GenerateUnaryResponse(outputs=[generate_pb2.Output(text=prompt)])

    async def _wait(self, prompt: str) -> None:
        if prompt == "bad":
            raise InvalidArgument("n is 99, the range is 1..64", field="sampling.n")
        if prompt == "busy" and self.num_busy:
            self.num_busy -= 1
            raise ResourceExhausted("too many", retry_after_ms=1)
        if prompt == "hang":
            self.hanging.set()
            await asyncio.Event().wait()
        if prompt == "first":
            await self.enough.wait()


@asynccontextmanager
async def serving(frontend: EchoFrontend) -> AsyncIterator[str]:
    add = partial(inference_pb2_grpc.add_InferenceServiceServicer_to_server, frontend)
    registration = Registration("triptych.api.v1.InferenceService", add, is_ready=True)
    server = Server(listen="127.0.0.1:0", registrations=[registration], profile=PUBLIC, service="frontend")
    address = await server.start()
    try:
        yield f"--url=grpc://{address}"
    finally:
        await server.stop(0)


def lines_of(*prompts: str) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"id-{index}", "call": "generate", "body": {"prompt": prompt}}
        for index, prompt in enumerate(prompts)
    ]


class Files:
    """The two files of a batch."""

    def __init__(self, folder: Path, lines: list[dict[str, Any]]) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        self.input.write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def run(self, *arguments: str, interrupt_when: asyncio.Event | None = None) -> Outcome:
        return await triptych(
            *("run-batch", "-i", str(self.input), "-o", str(self.output), *arguments),
            interrupt_when=interrupt_when,
        )

    def results(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def texts(self) -> list[str | None]:
        responses = [result["response"] for result in self.results()]
        return [response and response["outputs"][0]["text"] for response in responses]


async def test_results_come_in_the_order_of_the_input_whatever_is_answered_first(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("first", *(f"p{index}" for index in range(20))))
    async with serving(EchoFrontend(first_waits_for=7)) as url:
        outcome = await files.run(url, "--concurrency=4")
    assert outcome.exit_code == 0
    assert outcome.err == "21 lines: 21 answered, 0 failed, 0 done before\n"
    assert files.texts() == ["first", *(f"p{index}" for index in range(20))]
    assert [result["custom_id"] for result in files.results()] == [f"id-{index}" for index in range(21)]


async def test_no_more_are_in_flight_than_asked_for(tmp_path: Path) -> None:
    frontend = EchoFrontend(together=3)
    files = Files(tmp_path, lines_of(*("p" for _ in range(31))))
    async with serving(frontend) as url:
        await files.run(url, "--concurrency=3")
    assert (frontend.max_in_flight, frontend.num_answered) == (3, 31)


async def test_bad_lines_fail_alone(tmp_path: Path) -> None:
    lines = lines_of("a", "bad", "b")
    lines.insert(1, {"custom_id": "wrong", "call": "nothing", "body": {}})
    lines.append({**lines[0], "body": {"prompt": "again"}})
    files = Files(tmp_path, lines)
    async with serving(EchoFrontend()) as url:
        outcome = await files.run(url)
    assert outcome.exit_code == 1
    assert outcome.err == "5 lines: 2 answered, 3 failed, 0 done before\n"
    assert files.texts() == ["a", None, None, "b", None]
    errors = [result["error"] for result in files.results()]
    assert [error and error["code"] for error in errors] == [
        None,
        "INVALID_ARGUMENT",
        "INVALID_ARGUMENT",
        None,
        "INVALID_ARGUMENT",
    ]
    assert [error and error["violations"][0]["field"] for error in errors] == [
        None,
        "call",
        "sampling.n",
        None,
        "custom_id",
    ]


async def test_what_the_server_does_not_serve_is_an_error_of_its_line(tmp_path: Path) -> None:
    chat = {
        "custom_id": "c",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "hi"}]},
    }
    files = Files(tmp_path, [chat, *lines_of("a")])
    async with serving(EchoFrontend()) as url:
        outcome = await files.run(url)
    assert outcome.exit_code == 1
    assert [result["error"] and result["error"]["code"] for result in files.results()] == [
        "UNIMPLEMENTED",
        None,
    ]


async def test_a_busy_server_is_asked_again_within_the_limit(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("busy"))
    frontend = EchoFrontend(num_busy=2)
    async with serving(frontend) as url:
        assert (await files.run(url, "--max-attempts=3")).exit_code == 0
    assert len(frontend.prompts) == 3
    files.output.unlink()
    async with serving(EchoFrontend(num_busy=2)) as url:
        assert (await files.run(url, "--max-attempts=2")).exit_code == 1
    assert files.results()[0]["error"]["code"] == "RESOURCE_EXHAUSTED"


async def test_an_interrupted_batch_goes_on_without_asking_again(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("a", "b", "hang", "c"))
    frontend = EchoFrontend()
    async with serving(frontend) as url:
        outcome = await files.run(url, "--concurrency=1", interrupt_when=frontend.hanging)
    assert outcome.exit_code == 130
    assert "--resume goes on" in outcome.err
    assert files.texts() == ["a", "b"]
    files.input.write_text(files.input.read_text().replace("hang", "works"))
    again = EchoFrontend()
    async with serving(again) as url:
        refused = await files.run(url)
        outcome = await files.run(url, "--resume")
    assert (refused.exit_code, outcome.exit_code) == (2, 0)
    assert again.prompts == ["works", "c"]
    assert files.texts() == ["a", "b", "works", "c"]


async def test_a_failure_before_a_resume_still_makes_exit_code_1(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("bad", "a"))
    async with serving(EchoFrontend()) as url:
        await files.run(url)
        outcome = await files.run(url, "--resume")
    assert outcome.exit_code == 1
    assert outcome.err == "2 lines: 0 answered, 0 failed, 2 done before, 1 of them failed\n"


async def test_a_server_that_is_not_there_costs_no_line(tmp_path: Path) -> None:
    files = Files(tmp_path, lines_of("a"))
    outcome = await files.run("--url=grpc://127.0.0.1:1")
    assert outcome.exit_code == 1
    assert outcome.err.startswith("UNAVAILABLE: grpc://127.0.0.1:1")
    assert files.results() == []


async def test_files_that_cannot_be_used_are_exit_code_2(tmp_path: Path) -> None:
    outcome = await triptych("run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"))
    assert outcome.exit_code == 2
    assert "cannot read" in outcome.err
