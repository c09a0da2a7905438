"""The verb `run-batch`: answers a file of requests in order. Knows no line format."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import grpc.aio
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from triptych.api.v1 import chat_pb2, chat_pb2_grpc, generate_pb2, inference_pb2, inference_pb2_grpc
from triptych_cli.client_channel import open_client_channel
from triptych_cli.run_batch.files import BatchFileError, Done, count_lines, open_output, read_lines
from triptych_cli.run_batch.line import Answer, BatchLine, Request, answer_record, error_record, read_line
from triptych_cli.verbs.failures import Target, print_failure
from triptych_kit.errors import (
    InvalidArgument,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    rpc_errors_translated,
)

_USAGE_ERROR = 2
_INTERRUPTED = 130
_CONNECT_LIMIT_S = 3.0
# Limit of results that wait for an earlier one, as a multiple of the requests in flight.
_WINDOW = 4
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Options of a batch run."""

    input_file: str
    output_file: str
    url: str
    model: str  # for lines without a model
    concurrency: int
    resume: bool
    max_attempts: int
    timeout_s: float | None


def run_batch(batch: Batch) -> int:
    """Answer every line that has no result yet.

    Returns 0; 1 if a line failed, now or in an earlier run, or no server was reached; 2 for files or
    options that cannot be used; 130 after an interrupt.
    """
    tally, total = _Tally(), 0
    try:
        total = count_lines(Path(batch.input_file))
        output, done = open_output(Path(batch.input_file), Path(batch.output_file), resume=batch.resume)
        with output:
            asyncio.run(_answer_all(batch, output, done, total, tally))
    except BatchFileError as error:
        print(f"triptych run-batch: {error}", file=sys.stderr)
        return _USAGE_ERROR
    except InvalidArgument as error:
        print_failure(error, Target(batch.url, batch.timeout_s, flags={"target": "--url"}))
        return _USAGE_ERROR
    except ServiceError as error:
        print_failure(error, Target(batch.url, batch.timeout_s, flags={"target": "--url"}))
        return 1
    except KeyboardInterrupt:
        num_done = tally.num_answered + tally.num_failed + tally.num_skipped
        shown = f"interrupted, {num_done} of {total} lines are done, --resume continues"
        print(f"triptych run-batch: {shown}", file=sys.stderr)
        return _INTERRUPTED
    num_failed = tally.num_failed + done.num_failed
    counts = f"{tally.num_answered} answered, {tally.num_failed} failed, {tally.num_skipped} done before"
    earlier = f", {done.num_failed} of them failed" if done.num_failed else ""
    print(f"{total} lines: {counts}{earlier}", file=sys.stderr)
    if tally.first_failure:
        print(f"first failure: {tally.first_failure}", file=sys.stderr)
    return 1 if num_failed else 0


@dataclass(slots=True)
class _Tally:
    num_answered: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    first_failure: str = ""


async def _answer_all(batch: Batch, output: BinaryIO, done: Done, total: int, tally: _Tally) -> None:
    async with open_client_channel(batch.url) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), _CONNECT_LIMIT_S)
        except TimeoutError as error:
            raise Unavailable(f"{batch.url} was not reached within {_CONNECT_LIMIT_S:g} s") from error
        console = Console(stderr=True)
        columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("requests", total=total)
            await _Runner(batch, channel, output, tally, lambda: progress.advance(bar)).run(done)


class _Runner:
    """Keeps `concurrency` requests in flight and writes the results in the order of the input."""

    def __init__(
        self,
        batch: Batch,
        channel: grpc.aio.Channel,
        output: BinaryIO,
        tally: _Tally,
        on_line: Callable[[], None],
    ) -> None:
        self._batch = batch
        self._inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self._chat = chat_pb2_grpc.ChatServiceStub(channel)
        self._output = output
        self._on_line = on_line
        self._slots = asyncio.Semaphore(batch.concurrency)
        self.tally = tally

    async def run(self, done: Done) -> None:
        """Answer and write every line that is not done."""
        seen: set[str] = set()
        waiting: deque[asyncio.Task[dict[str, Any]]] = deque()
        async with asyncio.TaskGroup() as tasks:
            for number, text in read_lines(Path(self._batch.input_file)):
                line = read_line(number, text, self._batch.model)
                if line.custom_id in done.custom_ids or number in done.unnamed_lines:
                    self.tally.num_skipped += 1
                    self._on_line()
                    continue
                waiting.append(tasks.create_task(self._answer(_without_duplicate(line, seen))))
                while waiting and (waiting[0].done() or len(waiting) >= _WINDOW * self._batch.concurrency):
                    self._write(await waiting.popleft())
            while waiting:
                self._write(await waiting.popleft())

    async def _answer(self, line: BatchLine) -> dict[str, Any]:
        if isinstance(line.request, ServiceError):
            return error_record(line, line.request)
        async with self._slots:
            try:
                return answer_record(line, await self._ask(line.request))
            except ServiceError as error:
                return error_record(line, error)

    async def _ask(self, request: Request) -> Answer:
        """Make the call, with retries while the server is busy or away; raises the last error."""
        backoff_s = _FIRST_BACKOFF_S
        for attempt in range(1, self._batch.max_attempts + 1):
            try:
                return await self._ask_once(request)
            except (Unavailable, ResourceExhausted) as error:
                if attempt == self._batch.max_attempts:
                    raise
                wait_s = backoff_s if error.retry_after_ms is None else error.retry_after_ms / 1000
                await asyncio.sleep(min(wait_s, _MAX_BACKOFF_S))
                backoff_s *= 2
        raise AssertionError("there is at least one attempt")

    async def _ask_once(self, request: Request) -> Answer:
        with rpc_errors_translated():
            if isinstance(request, generate_pb2.GenerateRequest):
                completion: inference_pb2.GenerateUnaryResponse = await self._inference.GenerateOnce(
                    request, timeout=self._batch.timeout_s
                )
                return completion
            answer: chat_pb2.ChatUnaryResponse = await self._chat.ChatOnce(
                request, timeout=self._batch.timeout_s
            )
            return answer

    def _write(self, record: dict[str, Any]) -> None:
        self._output.write(json.dumps(record).encode() + b"\n")
        # After a crash only requests in flight are lost, not results.
        self._output.flush()
        if record["error"] is None:
            self.tally.num_answered += 1
        else:
            self.tally.num_failed += 1
            if not self.tally.first_failure:
                error = record["error"]
                self.tally.first_failure = f"line {record['line']}: {error['code']}: {error['message']}"
        self._on_line()


def _without_duplicate(line: BatchLine, seen: set[str]) -> BatchLine:
    """The line, or an error if its id was used before: the two results could not be distinguished."""
    if line.custom_id is None:
        return line
    if line.custom_id in seen:
        error = InvalidArgument(f"custom_id {line.custom_id!r} is on an earlier line too", field="custom_id")
        return BatchLine(line.number, line.custom_id, error)
    seen.add(line.custom_id)
    return line
