"""Tokenizes, renders chat templates and checks large messages in child processes, off the event
loop. Knows no requests.

Processes and not threads: a hang in a tokenizer's regular expression or in a template's loop can be killed at
its time limit. It then costs one failed request and a new process, and never blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from google.protobuf.descriptor import Descriptor

from frontend_svc.text.tokenize.id_column import id_column
from frontend_svc.text.tokenize.text_files import TextFiles
from frontend_svc.text.workers.frames import Frame, FrameError, unpack_numbers
from frontend_svc.text.workers.link import WORKER_COMMAND
from frontend_svc.text.workers.slot import WorkerSlot
from frontend_svc.text.workers.work_queue import Work, WorkQueue
from triptych_kit.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from triptych_kit.security.identity import current_identity
from triptych_kit.shares import SLOW_S
from triptych_kit.wire_check import MessageLimits

logger = logging.getLogger(__name__)

_MAX_QUEUED = 2048
_MAX_QUEUED_BYTES = 256 * 1024 * 1024
_MAX_WAIT_S = 30.0
_RETRY_AFTER_MS = 1000
# A worker may have been killed from outside, so a task is retried once; a second death is the task's fault.
_MAX_ATTEMPTS = 2
_MAX_MODELS = 64
_MAX_RENDERED_CHARS = 1024 * 1024
_CLOSE_WAIT_S = 5.0


@dataclass(slots=True)
class Wait:
    """How long tasks waited for a worker, each on its own."""

    seconds: float = 0.0


_wait: ContextVar[Wait | None] = ContextVar("wait", default=None)


@contextlib.contextmanager
def noting_wait() -> Iterator[Wait]:
    """Note the waiting of all tasks of this block, which other tasks of asyncio may send."""
    wait = Wait()
    token = _wait.set(wait)
    try:
        yield wait
    finally:
        _wait.reset(token)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a text: ids, spellings, and start and end offsets in characters."""

    ids: list[int]
    tokens: list[str]
    starts: list[int]
    ends: list[int]


class TextWorkers:
    """A pool of worker processes, started with the first task, and their queue.

    A worker runs one task at a time. After `time_limit_s` it is killed and replaced, and the task fails with
    InvalidArgument, reason TEXT_TIME_LIMIT: the same text would take as long again, and DeadlineExceeded or
    ResourceExhausted would invite clients to retry. A task whose worker died for another reason is retried
    once. With two or more workers, one is reserved for short tasks, and tenants share them, see `WorkQueue`.

    command: what a worker runs; tests replace it.
    """

    def __init__(
        self,
        num_processes: int = 0,
        *,
        time_limit_s: float = 5.0,
        command: Sequence[str] = WORKER_COMMAND,
        max_queued: int = _MAX_QUEUED,
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        self._max_wait_s = max_wait_s
        num_processes = num_processes or num_cores()
        self._queue = WorkQueue(num_processes, max_queued, _MAX_QUEUED_BYTES)
        self._models: dict[str, TextFiles] = {}
        self._slots = [
            WorkerSlot(
                command, time_limit_s, on_free=self._dispatch, on_end=self._end_work, on_lost=self._lost
            )
            for _ in range(num_processes)
        ]
        self._next_dispatch: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the running workers."""
        return [slot.process_id for slot in self._slots if slot.process_id]

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    async def load(self, files: TextFiles) -> str:
        """Load `files` in a worker ahead of the first request; the others load them when they are idle.

        Returns their key. Raises InvalidArgument for files that cannot be read.
        """
        await self._run(files, {"verb": "ready"}, b"", "tokenizer")
        return files.key

    async def encode(
        self, files: TextFiles, text: str, *, add_special_tokens: bool, field: str = "prompt"
    ) -> list[int]:
        """The token ids of `text`. Errors name `field`."""
        header = {"verb": "encode", "add_special_tokens": add_special_tokens}
        frame = await self._run(files, header, _utf8(text, field), field)
        return unpack_numbers(frame.body)

    async def encode_all(
        self, files: TextFiles, texts: Mapping[str, str], *, add_special_tokens: bool
    ) -> list[list[int]]:
        """The token ids of a few short texts, in one task. texts: by their fields, which errors name."""
        contents = [_utf8(text, field) for field, text in texts.items()]
        header = {
            "verb": "encode_all",
            "add_special_tokens": add_special_tokens,
            "fields": list(texts),
            "sizes": [len(content) for content in contents],
        }
        frame = await self._run(files, header, b"".join(contents), next(iter(texts)))
        counts, numbers = frame.numbers("counts"), unpack_numbers(frame.body)
        if len(counts) != len(texts) or sum(counts) != len(numbers):
            raise FrameError(f"{len(texts)} texts have {len(counts)} counts, of {len(numbers)} ids")
        ends = itertools.accumulate(counts)
        return [numbers[end - count : end] for count, end in zip(counts, ends, strict=True)]

    async def encode_with_offsets(
        self, files: TextFiles, text: str, *, add_special_tokens: bool, field: str = "text"
    ) -> Encoded:
        """The tokens of `text` as spelled in the vocabulary, with their offsets in it."""
        header = {"verb": "encode_with_offsets", "add_special_tokens": add_special_tokens}
        frame = await self._run(files, header, _utf8(text, field), field)
        num_tokens = int(frame.number("num_tokens"))
        columns, spellings = frame.split(12 * num_tokens)
        numbers = unpack_numbers(columns)
        tokens = spellings.decode().split(frame.text("separator")) if num_tokens else []
        return Encoded(
            numbers[:num_tokens], tokens, numbers[num_tokens : 2 * num_tokens], numbers[2 * num_tokens :]
        )

    async def decode(
        self,
        files: TextFiles,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        field: str = "token_ids",
    ) -> str:
        """The text of `token_ids`, decoded in one piece."""
        header = {"verb": "decode", "skip_special_tokens": skip_special_tokens}
        frame = await self._run(files, header, id_column(token_ids), field)
        return frame.body.decode()

    async def render(
        self,
        files: TextFiles,
        conversation: Mapping[str, object],
        *,
        max_chars: int = _MAX_RENDERED_CHARS,
        field: str = "messages",
    ) -> str:
        """Render a conversation, see `ChatTemplate.render`. Errors of the template raise InvalidArgument."""
        header = {"verb": "render", "max_chars": max_chars}
        frame = await self._run(files, header, _json(conversation, field), field)
        return frame.body.decode()

    async def render_and_encode(
        self,
        files: TextFiles,
        conversation: Mapping[str, object],
        *,
        max_chars: int = _MAX_RENDERED_CHARS,
        field: str = "messages",
    ) -> tuple[str, list[int]]:
        """The prompt of a conversation and its token ids, in one task."""
        header = {"verb": "render_and_encode", "max_chars": max_chars}
        frame = await self._run(files, header, _json(conversation, field), field)
        text, token_ids = frame.split(int(frame.number("num_text_bytes")))
        return text.decode(), unpack_numbers(token_ids)

    async def check_message(self, data: bytes, descriptor: Descriptor, limits: MessageLimits) -> None:
        """Check a serialized message of generated code, see `check_wire`. Raises InvalidArgument."""
        header = {
            "verb": "check",
            "module": descriptor.file.name.removesuffix(".proto").replace("/", ".") + "_pb2",
            "message": descriptor.full_name,
            "max_fields": limits.max_fields,
            "max_numbers": limits.max_numbers,
        }
        await self._run(None, header, data, "the request")

    async def check_json(self, data: bytes, *, max_fields: int, max_numbers: int) -> None:
        """Check how much a JSON text contains before it is parsed. Raises InvalidArgument."""
        header = {"verb": "check_json", "max_fields": max_fields, "max_numbers": max_numbers}
        await self._run(None, header, data, "body")

    async def close(self) -> None:
        """End all workers; queued and running tasks fail with Unavailable."""
        self._is_closed = True
        if self._next_dispatch is not None:
            self._next_dispatch.cancel()
        for work in self._queue.clear():
            work.fail(Unavailable("the frontend is stopping"))
        for slot in self._slots:
            slot.close(Unavailable("the frontend is stopping"))
        await asyncio.gather(*(slot.wait_closed(_CLOSE_WAIT_S) for slot in self._slots))

    async def _run(
        self,
        files: TextFiles | None,
        header: Mapping[str, object],
        body: bytes,
        field: str,
    ) -> Frame:
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        identity = current_identity()
        work = Work(files, header, body, field, answer, identity.account, identity.weight)
        if self._is_closed:
            raise Unavailable("the frontend is stopping")
        if all(slot.is_failing for slot in self._slots):
            raise Unavailable(
                "the processes that tokenize cannot be started",
                reason="TEXT_WORKERS_FAILING",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._queue.check_room(work)
        if files is not None:
            self._remember(files)
        self._enqueue(work, first=False)
        try:
            frame = await work.answer
        finally:
            if work.expiry is not None:
                work.expiry.cancel()
            # The task of a cancelled request is removed; one that has begun is bounded by its time limit.
            self._queue.remove(work)
            if (wait := _wait.get()) is not None:
                wait.seconds += work.waited_s
        if (refusal := frame.header.get("refused")) is not None:
            raise _refused(str(refusal), frame, field)
        return frame

    def _remember(self, files: TextFiles) -> None:
        self._models[files.key] = self._models.pop(files.key, files)
        while len(self._models) > _MAX_MODELS:
            self._models.pop(next(iter(self._models)))

    def _dispatch(self) -> None:
        """Give queued tasks to free workers."""
        now = asyncio.get_running_loop().time()
        for slot in self._slots:
            if self._is_closed:
                return
            if not slot.is_free:
                slot.start()
                continue
            num_long = sum(other.is_busy_long for other in self._slots)
            may_be_long = num_long < max(1, len(self._slots) - 1)
            work = self._queue.take(now, may_be_long=may_be_long)
            if work is not None and work.files is not None and self._reads_first(slot, work.files):
                # A worker that has loaded the files will be free before this one has loaded them.
                self._queue.put_back(work, now)
                slot.read_ahead({work.files.key: work.files})
            elif work is not None:
                slot.begin(work)
            elif may_be_long:
                slot.read_ahead(self._models)
        if len(self._queue) and any(slot.is_free for slot in self._slots):
            self._dispatch_later()

    def _dispatch_later(self) -> None:
        """Try again when a task that runs now may have turned out to be a slow one."""
        if self._next_dispatch is None:
            self._next_dispatch = asyncio.get_running_loop().call_later(SLOW_S, self._dispatch_again)

    def _dispatch_again(self) -> None:
        self._next_dispatch = None
        self._dispatch()

    def _end_work(self, work: Work) -> None:
        self._queue.end(work, asyncio.get_running_loop().time())

    def _enqueue(self, work: Work, *, first: bool) -> None:
        loop = asyncio.get_running_loop()
        work.expiry = loop.call_later(self._max_wait_s, self._give_up_waiting, work)
        self._queue.add(work, loop.time(), first=first)
        self._dispatch()

    def _reads_first(self, slot: WorkerSlot, files: TextFiles) -> bool:
        return slot.may_read(files) and any(other.has_read(files) for other in self._slots)

    def _lost(self, work: Work) -> None:
        """The worker died while it ran `work`."""
        if work.expiry is not None:
            work.expiry.cancel()
        if work.answer.done():
            return
        if work.num_attempts < _MAX_ATTEMPTS:
            self._enqueue(work, first=True)
            return
        work.fail(Internal("two processes died while processing this text", reason="TEXT_WORKER_DIED"))

    def _give_up_waiting(self, work: Work) -> None:
        if work.is_queued:
            self._queue.remove(work)
            work.fail(
                ResourceExhausted(
                    f"the text waited for a worker longer than the limit of {self._max_wait_s:g} s",
                    reason="TEXT_QUEUE_FULL",
                    retry_after_ms=_RETRY_AFTER_MS,
                )
            )


def num_cores() -> int:
    """Number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _refused(refusal: str, frame: Frame, field: str) -> InvalidArgument:
    entries = frame.header.get("violations")
    if not isinstance(entries, list):
        reason = str(frame.header.get("reason", "TEXT_REFUSED"))
        return InvalidArgument(refusal, field=str(frame.header.get("field") or field), reason=reason)
    violations = [(str(name), str(description)) for name, description in entries]
    return InvalidArgument(refusal, violations=violations, reason=frame.text("reason"))


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{field} has half a character (a lone surrogate) at {error.start}",
            field=field,
            reason="TEXT_REFUSED",
        ) from error


def _json(conversation: Mapping[str, object], field: str) -> bytes:
    try:
        return json.dumps(conversation).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{field} cannot be passed to a chat template: {error}", field=field, reason="TEXT_REFUSED"
        ) from error
