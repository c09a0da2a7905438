"""The state of a request in flight: its text and logprobs, from steps to the collector."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from time import perf_counter_ns, time_ns
from typing import Protocol

from google.protobuf.message import Message

from frontend_svc.output.collector import Collector, Ending, EndReason
from frontend_svc.output.engine_times import EngineTimes, Progress
from frontend_svc.output.logprobs import LogprobColumns, LogprobReader
from frontend_svc.output.loss import Loss, LossKind
from frontend_svc.output.output_text import OutputText
from frontend_svc.parsers.message import MessageParser
from frontend_svc.parsers.parser import Piece, ToolCallPiece
from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer
from triptych.engine.v1 import step_pb2
from triptych_kit.errors import ServiceError, Unavailable


class OutputReader(Protocol):
    """Reads what engines add to the rows of one output beside its tokens, and reports it in the answer.

    extra: the field of StepExtra that it reads.
    is_awaited: whether the client gets nothing before the output has begun.
    fill: called with each message that begins the answer or ends the output, and the output's tokens until
    then, to set fields of its own.
    """

    extra: str
    is_awaited: bool

    def read(self, extra: step_pb2.StepExtra) -> None: ...

    def fill(self, message: Message, output_token_ids: Sequence[int]) -> None: ...


class TokenMeter(Protocol):
    """Counts and times tokens. before_ns: when those before them arrived; 0: there were none."""

    def note_tokens(self, num_tokens: int, now_ns: int, before_ns: int) -> None: ...


_BY_ITSELF = frozenset({EndReason.STOP, EndReason.LENGTH, EndReason.REPETITION})


class RequestState:
    """One request in flight, output `index` of its collector.

    Owned by the `OutputProcessor` it is registered with, until it ends or its engine is lost.

    on_lost: called if its engine is lost, or refuses it and another may not; the state can then continue.
    on_output: called once, at the next tokens, or at an end that no client has caused.
    on_ended: called when the output has ended by itself, with the name of the first tool that it calls; "":
    it calls none; None: its calls are not parsed.
    """

    __slots__ = (
        "_called", "_extras", "_index", "_logprobs", "_text", "collector", "detokenize_ns", "ending",
        "first_output_at_ns", "is_continued", "last_output_at_ns", "meter", "on_ended", "on_lost",
        "on_output", "output_token_ids", "times",
    )  # fmt: skip

    def __init__(
        self,
        collector: Collector,
        detokenizer: Detokenizer | None,
        stops: StopBuffer | None,
        *,
        include_stop: bool,
        min_tokens: int,
        parser: MessageParser | None = None,
        stops_in_content: bool = False,
        index: int = 0,
        logprobs: LogprobReader | None = None,
        readers: Sequence[OutputReader] = (),
    ) -> None:
        self.collector = collector
        self._text = None
        if detokenizer is not None:
            self._text = OutputText(
                detokenizer,
                stops,
                parser,
                stops_in_content=stops_in_content,
                include_stop=include_stop,
                min_tokens=min_tokens,
            )
        self._index = index
        self._called = "" if parser is not None and parser.finds_calls else None
        self._logprobs = logprobs
        self._extras = _Extras(readers)
        self.output_token_ids = array("I")
        self.times = EngineTimes()
        self.ending: Ending | None = None
        self.is_continued = False  # whether its group began on an engine that was lost
        self.on_lost: Callable[[LossKind, ServiceError], None] | None = None
        self.on_output: Callable[[], None] | None = None
        self.on_ended: Callable[[str | None], None] | None = None
        self.meter: TokenMeter | None = None
        self.detokenize_ns = 0
        self.first_output_at_ns = 0
        self.last_output_at_ns = 0

    @property
    def wants_logprobs(self) -> bool:
        return self._logprobs is not None

    @property
    def has_stop_strings(self) -> bool:
        return self._text is not None and self._text.has_stop_strings

    @property
    def has_ended(self) -> bool:
        return self.ending is not None

    @property
    def has_begun(self) -> bool:
        """Whether there was any output, or anything for a reader."""
        return self._extras.has_read or len(self.output_token_ids) > 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output, whether read or not."""
        return len(self.output_token_ids)

    def advance(
        self, token_ids: list[int], ending: Ending | None, columns: LogprobColumns | None = None
    ) -> Ending | None:
        """Add one step's tokens and the engine's ending; returns how the output ended, if it did.

        A stop string ends the output even if the engine has not ended it, or for another reason. All tokens
        of the step stay in the output, as they were produced.
        """
        started_at_ns = perf_counter_ns()
        text = ""
        parts: list[Piece] | None = None
        if self._text is not None:
            text, parts, stop = self._text.advance(token_ids, len(self.output_token_ids), ending)
            if stop is not None:
                drafts = None if ending is None else ending.drafts
                ending = Ending(EndReason.STOP, stop_string=stop, drafts=drafts)
        self.output_token_ids.extend(token_ids)
        if ending is not None:
            self.ending = ending
            self.times.end()
        if self._logprobs is None or columns is None or not token_ids:
            self.collector.put(self._index, text, token_ids, ending, parts=parts)
        else:
            logprobs = self._logprobs.read(token_ids, columns)
            cumulative = self._logprobs.cumulative
            self.collector.put(self._index, text, token_ids, ending, logprobs, cumulative, parts=parts)
        now_ns = time_ns()
        if self.meter is not None and token_ids:
            self.meter.note_tokens(len(token_ids), now_ns, self.last_output_at_ns)
        self.last_output_at_ns = now_ns
        if not self.first_output_at_ns:
            self.first_output_at_ns = now_ns
        self.detokenize_ns += perf_counter_ns() - started_at_ns
        if self.on_output is not None and (
            token_ids if ending is None else ending.reason is not EndReason.ABORT
        ):
            on_output, self.on_output = self.on_output, None
            on_output()
        if self.on_ended is not None:
            self._note_calls(self.on_ended, parts or (), ending)
        return ending

    def _note_calls(
        self, on_ended: Callable[[str | None], None], parts: Sequence[Piece], ending: Ending | None
    ) -> None:
        if self._called == "":
            names = (part.name for part in parts if isinstance(part, ToolCallPiece))
            self._called = next(filter(None, names), "")
        if ending is not None and ending.reason in _BY_ITSELF and not ending.turn_ended:
            on_ended(self._called)

    def note_cached(self, num_cached_tokens: int) -> None:
        # For a request that was moved, the value of the first engine is kept.
        if not self.is_continued:
            self.collector.note_cached(num_cached_tokens)

    def note_progress(self, progress: Progress) -> None:
        self.times.note(progress)

    def fail(self, error: ServiceError) -> None:
        """End with `error`, which the reader gets next, or continue elsewhere if that may help."""
        self.times.end()
        # One engine has accepted it already: one that refuses it has other limits, or has reached them.
        may_go_on = isinstance(error, Unavailable) or self.is_continued
        if self.on_lost is not None and may_go_on:
            self.on_lost(LossKind.REFUSED, error)
        else:
            self.collector.fail(error)

    def lose(self, loss: Loss) -> None:
        """The engine is lost: continue elsewhere, or end with the loss's error."""
        self.times.end()
        if self.on_lost is None:
            self.collector.fail(loss.error())
        else:
            self.on_lost(loss.kind, loss.error())

    def add_extra(self, extra: step_pb2.StepExtra) -> None:
        """Pass it to its reader; without one it is ignored."""
        kind = extra.WhichOneof("extra") or ""
        if kind == "nan_count":
            self.times.num_nan_logits += extra.nan_count
        self._extras.read(kind, extra)

    def fill(self, message: Message) -> None:
        """Add to a message of the answer what the readers have read."""
        self._extras.fill(message, self.output_token_ids)


class _Extras:
    """The readers of an output, by the field of StepExtra."""

    __slots__ = ("_readers", "has_read")

    def __init__(self, readers: Sequence[OutputReader]) -> None:
        self._readers = {reader.extra: reader for reader in readers}
        self.has_read = False

    def read(self, kind: str, extra: step_pb2.StepExtra) -> None:
        reader = self._readers.get(kind)
        if reader is not None:
            reader.read(extra)
            self.has_read = True

    def fill(self, message: Message, output_token_ids: Sequence[int]) -> None:
        for reader in self._readers.values():
            reader.fill(message, output_token_ids)
