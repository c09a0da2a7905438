"""GenerateSession: a series of turns over one stream, each of which continues all tokens before it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from array import array
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from frontend_svc.generation.answers.generate import messages_of
from frontend_svc.generation.answers.messages import kind_of, started_message
from frontend_svc.generation.caller import Caller
from frontend_svc.generation.generation import Generation, OpenRequest
from frontend_svc.generation.kept_request import KeptRequest
from frontend_svc.output.collector import EndReason, Output
from frontend_svc.text.limits import Violations
from frontend_svc.text.model import ServedModel
from frontend_svc.text.prompt import RequestPrompt, too_long
from triptych.api.v1 import generate_pb2, inference_pb2
from triptych_kit.errors import InvalidArgument, ResourceExhausted, ServiceError, with_fields
from triptych_kit.security.identity import Identity
from triptych_kit.shares import LimitPart, SharedLimit
from triptych_kit.telemetry.metrics import Counts

Request = inference_pb2.GenerateSessionRequest
Response = inference_pb2.GenerateSessionResponse

# Input that waits for the turns before it, of a session and of all sessions.
_MAX_WAITING_APPENDS = 64
_MAX_WAITING_BYTES = 16 * 1024 * 1024
_MAX_SUM_BYTES = 256 * 1024 * 1024
_RETRY_AFTER_MS = 1000
# Ends of turns after which a session goes on.
_GO_ON = frozenset({EndReason.STOP, EndReason.LENGTH, EndReason.REPETITION})


class SessionAnswers:
    """Answers to streams of input. Closing one aborts its turn."""

    def __init__(
        self,
        generation: Generation,
        sessions: Counts,
        *,
        max_sessions: int,
        max_waiting_bytes: int = _MAX_SUM_BYTES,
    ) -> None:
        """sessions: open ones by API.  max_waiting_bytes: of the input that waits in all sessions."""
        self._generation, self._sessions = generation, sessions
        self._open, self._waiting = SharedLimit(max_sessions), SharedLimit(max_waiting_bytes)

    async def stream(
        self, messages: AsyncIterator[Request], caller: Caller
    ) -> AsyncGenerator[Response, None]:
        """The messages of Generate for each turn. Ends after the last input's turn, or with an error."""
        identity = caller.identity
        with self._counted(identity):
            waiting = LimitPart(self._waiting, identity.account, identity.weight)
            inbox, kept = _Inbox(waiting), KeptRequest()
            reading = asyncio.ensure_future(inbox.read(messages))
            try:
                session = _Session(self._generation, caller, inbox, kept, await inbox.start())
                append = None
                while not session.is_over:
                    async with contextlib.aclosing(session.turn(append)) as responses:
                        async for response in responses:
                            yield response
                    if not session.is_over and (append := await inbox.next()) is None:
                        yield session.end()
            finally:
                kept.close()
                reading.cancel()
                await asyncio.wait((reading,))
                inbox.clear()

    @contextmanager
    def _counted(self, identity: Identity) -> Iterator[None]:
        account, weight = identity.account, identity.weight
        if not self._open.has_room(account, weight):
            raise ResourceExhausted(
                f"{self._open.total} sessions are open, the limit is {self._open.limit}"
                f"{self._open.words(account, weight)}",
                reason="TOO_MANY_SESSIONS",
                retry_after_ms=_RETRY_AFTER_MS,
            )
        self._open.take(account, weight)
        self._sessions.add("generate")
        try:
            yield
        finally:
            self._sessions.add("generate", by=-1)
            self._open.give_back(account)


class _Session:
    """The tokens of a session, and the parameters of its next turn."""

    def __init__(
        self,
        generation: Generation,
        caller: Caller,
        inbox: _Inbox,
        kept: KeptRequest,
        start: generate_pb2.GenerateRequest,
    ) -> None:
        _check_start(start)
        self.is_over = False
        self._generation = generation
        self._caller = caller
        self._inbox = inbox
        self._kept = kept
        self._request = start
        # One seed, so that each turn is what Generate answers to its tokens with this seed.
        self._seed = start.sampling.seed if start.sampling.HasField("seed") else secrets.randbits(64)
        self._context = array("I")
        self._position = 0
        self._last = generate_pb2.Finished()

    async def turn(self, append: inference_pb2.SessionAppend | None) -> AsyncGenerator[Response, None]:
        """Answer an input; None: that of the start."""
        try:
            request, prompt = self._request, RequestPrompt(self._request)
            if append is not None:
                request, prompt = self._continued(append), _AppendedPrompt(self._context, append)
            request.sampling.seed = self._seed
            async with self._generation.open(
                request, prompt, self._caller, kind_of(request.sampling), kept=self._kept
            ) as opened:
                self._inbox.begin_turn(opened.end_turn, opened.end)
                output = await opened.next()
                started = started_message(opened, output, returns_ids=request.return_prompt_token_ids)
                self._position += 1
                first = generate_pb2.GenerateResponse(position=self._position, started=started)
                yield Response(response=first)
                while True:
                    for response in self._messages(opened, output):
                        yield response
                    if output.is_last:
                        return
                    output = await opened.next()
        except InvalidArgument as error:
            if append is None:
                raise
            raise with_fields(error, _name_in_append) from error

    def end(self) -> Response:
        """The last message where the input has ended after the last turn."""
        self.is_over = True
        last = generate_pb2.Finished(reason=self._last.reason)
        if self._last.HasField("stop_match"):
            last.stop_match.CopyFrom(self._last.stop_match)
        position = self._position + 1
        return Response(response=generate_pb2.GenerateResponse(position=position, finished=last))

    def _messages(self, opened: OpenRequest, output: Output) -> Iterator[Response]:
        self._inbox.raise_error()
        for message in messages_of(opened, output, self._position, {}):
            self._position = message.position
            response = Response(response=message)
            if message.HasField("finished"):
                self._end_turn(opened)
                self._last, response.turn_ended = message.finished, not self.is_over
            yield response

    def _end_turn(self, opened: OpenRequest) -> None:
        (state,) = opened.states
        ending = state.ending
        assert ending is not None, "its last output was read"
        is_cancelled = self._inbox.end_turn()
        goes_on = ending.reason in _GO_ON or (is_cancelled and ending.reason is EndReason.ABORT)
        self.is_over = not goes_on or self._inbox.is_done
        self._kept.end_turn(opened.num_prompt_tokens, state)
        num_kept = len(state.output_token_ids) - ending.is_by_token
        self._context = array("I", opened.prompt_token_ids) + state.output_token_ids[:num_kept]

    def _continued(self, append: inference_pb2.SessionAppend) -> generate_pb2.GenerateRequest:
        """The request of a turn after the first, without its input."""
        request = generate_pb2.GenerateRequest()
        self._request.ClearField("input")
        # The whole prompt counts from here on.
        self._request.ClearField("truncate_prompt_tokens")
        if append.HasField("sampling"):
            self._request.sampling.CopyFrom(append.sampling)
            if append.sampling.HasField("seed"):
                self._seed = append.sampling.seed
            _check_sampling(self._request)
        request.CopyFrom(self._request)
        return request


class _AppendedPrompt(RequestPrompt):
    """The tokens of a session, and an input behind them."""

    def __init__(self, context: array[int], append: inference_pb2.SessionAppend) -> None:
        request = generate_pb2.GenerateRequest(add_special_tokens=False)
        if append.HasField("prompt"):
            request.prompt = append.prompt
        elif append.HasField("token_ids"):
            request.token_ids.CopyFrom(append.token_ids)
        super().__init__(request)
        self._context = context

    async def tokenize(self, model: ServedModel, *, may_be_long: bool) -> list[int]:
        added = await super().tokenize(model, may_be_long=may_be_long)
        num_tokens = len(self._context) + len(added)
        if num_tokens >= model.max_model_len:
            shown = f"{len(added)} tokens, with those before them {num_tokens}"
            raise too_long(self.field, shown, num_tokens, model.max_model_len)
        return [*self._context, *added]


class _Inbox:
    """Messages of the client, read while turns run. waiting: its bytes, among those of all sessions."""

    def __init__(self, waiting: LimitPart) -> None:
        self._start: generate_pb2.GenerateRequest | None = None
        self._appends: deque[inference_pb2.SessionAppend] = deque()
        self._waiting = waiting
        self._has_ended = False  # no more input may follow
        self._is_over = False  # no more messages follow
        self._error: ServiceError | None = None
        self._cancel_turn: Callable[[], None] | None = None
        self._abort_turn: Callable[[], None] | None = None
        self._num_unended = 0  # turns
        self._is_cancelled = False  # the first of them
        self._changed = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether the turns so far are all."""
        return (self._has_ended or self._is_over) and not self._appends

    async def read(self, messages: AsyncIterator[Request]) -> None:
        """Read until the client's stream is over. An error ends the turn that runs, and then the session."""
        try:
            async for message in messages:
                self._take(message)
                self._changed.set()
        except ServiceError as error:
            self._error = error
            if self._abort_turn is not None:
                self._abort_turn()
        finally:
            self._is_over = True
            self._changed.set()

    async def start(self) -> generate_pb2.GenerateRequest:
        """Wait for the first message."""
        while self._start is None and not self._is_over:
            await self._change()
        self.raise_error()
        if self._start is None:
            raise InvalidArgument("start is missing, must be the first message", field="start")
        return self._start

    async def next(self) -> inference_pb2.SessionAppend | None:
        """Wait for the next input; None: there is no more."""
        while not self._appends and not self.is_done:
            await self._change()
        self.raise_error()
        if not self._appends:
            return None
        append = self._appends.popleft()
        self._waiting.add(-append.ByteSize())
        return append

    def clear(self) -> None:
        """Drop the inputs that wait."""
        self._appends.clear()
        self._waiting.clear()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def begin_turn(self, cancel: Callable[[], None], abort: Callable[[], None]) -> None:
        """From here on these are called when the client cancels the turn, and when an error ends the session.

        That may have been before.
        """
        self._cancel_turn, self._abort_turn = cancel, abort
        if self._error is not None:
            abort()
        elif self._is_cancelled:
            cancel()

    def end_turn(self) -> bool:
        """Returns whether the client has cancelled it."""
        self._num_unended -= 1
        self._cancel_turn = self._abort_turn = None
        was_cancelled, self._is_cancelled = self._is_cancelled, False
        return was_cancelled

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _take(self, message: Request) -> None:
        kind = message.WhichOneof("message")
        if kind is None:
            raise InvalidArgument("message is not set, must be one of its fields", field="message")
        if self._start is None:
            if kind != "start":
                raise InvalidArgument(f"{kind}: must not come before start", field=kind)
            self._start = message.start
            self._num_unended += 1
        elif kind == "start":
            raise InvalidArgument("start: must be sent once", field="start")
        elif kind == "append":
            self._add(message.append)
        elif kind == "end":
            self._has_ended = True
        elif self._num_unended and not self._is_cancelled:
            self._is_cancelled = True
            if self._cancel_turn is not None:
                self._cancel_turn()

    def _add(self, append: inference_pb2.SessionAppend) -> None:
        if self._has_ended:
            raise InvalidArgument("append: must not follow end", field="append")
        self._check_room(append.ByteSize())
        self._appends.append(append)
        self._num_unended += 1
        self._waiting.add(append.ByteSize())

    def _check_room(self, num_bytes: int) -> None:
        """Raise ResourceExhausted if an input of `num_bytes` may not wait."""
        num_appends, waiting = len(self._appends), self._waiting
        if num_appends >= _MAX_WAITING_APPENDS or waiting.amount > _MAX_WAITING_BYTES:
            text = (
                f"{num_appends} appends of {waiting.amount} bytes wait for their turns already, "
                f"the limits are {_MAX_WAITING_APPENDS} and {_MAX_WAITING_BYTES}"
            )
        elif not waiting.has_room(num_bytes):
            text = (
                f"appends of {waiting.shared.total} bytes wait for their turns in all sessions, "
                f"the limit is {waiting.shared.limit}{waiting.words()}"
            )
        else:
            return
        raise ResourceExhausted(text, reason="QUEUE_FULL", retry_after_ms=_RETRY_AFTER_MS)


def _check_start(start: generate_pb2.GenerateRequest) -> None:
    _check_sampling(start)
    kind = start.WhichOneof("input")
    if kind not in (None, "prompt", "token_ids"):
        raise InvalidArgument(f"{kind}: a session takes texts and token ids alone", field=kind)
    if start.orphan_grace_ms:
        raise InvalidArgument(
            f"orphan_grace_ms is {start.orphan_grace_ms}, must be 0 here: a session ends with its stream",
            field="orphan_grace_ms",
        )


def _check_sampling(request: generate_pb2.GenerateRequest) -> None:
    violations = Violations()
    n = request.sampling.n
    violations.need(n <= 1, "sampling.n", n, "must be 1 here: a session has one output a turn")
    violations.raise_if_any()


def _name_in_append(field: str) -> str:
    is_in_it = field in ("input", "prompt", "token_ids") or field.startswith("sampling.")
    return f"append.{field}" if is_in_it else field
