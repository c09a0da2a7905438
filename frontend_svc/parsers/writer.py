"""Writers that collect what grammars find, as joined pieces. Knows no format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from frontend_svc.parsers.parser import CallRules, ContentPiece, Piece, ReasoningPiece, ToolCallPiece
from frontend_svc.parsers.reader import SPACE, Reader


@dataclass(slots=True)
class _Run:
    """Consecutive texts of one kind, which become one piece; `call` has the fields of a call's piece."""

    is_reasoning: bool
    call: ToolCallPiece | None
    parts: list[str] = field(default_factory=list)

    def piece(self) -> Piece:
        text = "".join(self.parts)
        if self.call is not None:
            return replace(self.call, arguments_json=text)
        return ReasoningPiece(text) if self.is_reasoning else ContentPiece(text)


class PieceWriter:
    """Collects pieces until they are taken."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def content(self, text: str) -> None:
        if text:
            self._run(is_reasoning=False).append(text)

    def reasoning(self, text: str) -> None:
        if text:
            self._run(is_reasoning=True).append(text)

    def open_call(self, index: int, call_id: str, name: str) -> None:
        self._runs.append(_Run(False, ToolCallPiece(index, call_id, name, "")))

    def arguments(self, index: int, text: str, *, is_incomplete: bool = False) -> None:
        """Add arguments of the call that was opened last; with `is_incomplete` they end there."""
        last = self._runs[-1] if self._runs else None
        if last is None or last.call is None or last.call.index != index:
            last = _Run(False, ToolCallPiece(index, "", "", ""))
            self._runs.append(last)
        assert last.call is not None, "the run of a call"
        last.parts.append(text)
        if is_incomplete:
            last.call = replace(last.call, is_incomplete=True)

    def take(self) -> list[Piece]:
        """Remove and return the pieces, in order."""
        runs, self._runs = self._runs, []
        return [run.piece() for run in runs]

    def _run(self, *, is_reasoning: bool) -> list[str]:
        last = self._runs[-1] if self._runs else None
        if last is None or last.call is not None or last.is_reasoning != is_reasoning:
            last = _Run(is_reasoning, None)
            self._runs.append(last)
        return last.parts


class CallWriter:
    """Writes content and calls. A call is a candidate until `commit`; `abandon` turns its text into content.

    A candidate whose arguments were cut off by the end of an output is an incomplete call. At such an end,
    text behind a call, or where a call is demanded, is the beginning of one, and dropped.

    If `trims_space`, white space before, between and after calls belongs to the format and is dropped;
    otherwise it is content like any other text.

    num_calls: complete calls that were emitted. num_committed: also those that the rules drop.
    is_behind_call: nothing but white space came after the last call. is_first: nothing else came at all.
    """

    __slots__ = (
        "_arguments",
        "_closing",
        "_is_open",
        "_name",
        "_new_id",
        "_num_opened",
        "_reader",
        "_rules",
        "_space",
        "_trims_space",
        "is_behind_call",
        "is_first",
        "num_calls",
        "num_committed",
        "pieces",
    )

    def __init__(
        self, reader: Reader, rules: CallRules, new_id: Callable[[], str], *, trims_space: bool
    ) -> None:
        self._reader = reader
        self._rules = rules
        self._new_id = rules.new_id or new_id
        self._trims_space = trims_space
        self._space: list[str] = []
        self._num_opened = 0
        self._name: str | None = None
        self._arguments: list[str] = []
        self._closing = ""
        self._is_open = False
        self.is_first = not rules.is_continued
        self.is_behind_call = False
        self.num_calls = 0
        self.num_committed = 0
        self.pieces = PieceWriter()

    def content(self, text: str) -> None:
        """Add text that is no call; trailing white space is held back until more text follows."""
        if self._is_cut_off():
            return
        if not self._trims_space:
            self.pieces.content(text)
            self.is_behind_call = self.is_behind_call and not text
            return
        kept = text.rstrip(SPACE)
        if kept:
            self.pieces.content("".join(self._space) + kept)
            self._space.clear()
            self.is_first = self.is_behind_call = False
        if len(kept) < len(text):
            self._space.append(text[len(kept) :])

    def begin(self) -> None:
        """Begin a candidate at the next character that is taken."""
        self._reader.begin_record()

    def knows(self, name: str) -> bool:
        return name in self._rules.tool_names

    @property
    def is_held(self) -> bool:
        """Whether a grammar holds calls to their schemas."""
        return bool(self._rules.opening)

    def name(self, name: str, *, is_held: bool = False) -> bool:
        """Set the candidate's name. False if it has one already, there is no such tool, or it is no call.

        is_held: whether the candidate is known to be one that a grammar has held, if there is one.
        """
        is_held = is_held or self._rules.opening in self._reader.recorded
        if self._name is not None or not self.knows(name) or not is_held:
            return False
        self._name = name
        return True

    def arguments(self, text: str) -> None:
        """Add to the candidate's arguments; `text` was just taken from the reader."""
        if self._is_open:
            self._emit(text)
            return
        self._arguments.append(text)
        if self._rules.streams_arguments and self._name is not None and not self._is_dropped():
            self._open()

    def whole_arguments(self, text: str) -> None:
        """Set the candidate's arguments, which the model wrote in other words; emitted by `commit`."""
        self._arguments = [text]

    def commit(self) -> None:
        """The candidate is a complete call."""
        if not self._is_open and not self._is_dropped():
            self._arguments = self._arguments or ["{}"]
            self._open()
        if self._is_open:
            self.pieces.arguments(self._num_opened - 1, self._closing)
            self.num_calls += 1
        self.num_committed += 1
        self._reset()
        self.drop_space()
        self.is_first, self.is_behind_call = False, True

    def abandon(self) -> None:
        """The candidate is no call: the part not emitted yet becomes content, unchanged."""
        is_partial = self._reader.is_cut and self._name is not None and bool(self._arguments)
        is_dropped = is_partial and self._is_dropped()
        if is_partial and not is_dropped and not self._is_open:
            self._open()
        recorded = self._closing + self._reader.end_record()
        if self._is_open:
            self.pieces.arguments(self._num_opened - 1, "", is_incomplete=True)
            self.is_behind_call = self._reader.is_cut
        self._reset()
        self.content("" if is_dropped else recorded)

    def drop_space(self) -> None:
        """Drop the white space taken last: it is next to a marker."""
        self._space.clear()

    def drop_record(self) -> None:
        """Drop what was taken since `begin`: it is part of the format."""
        self._reader.end_record()

    def finish(self) -> None:
        if not self.is_behind_call and not self._is_cut_off():
            self.pieces.content("".join(self._space))
        self._space.clear()

    def _is_cut_off(self) -> bool:
        """Whether text that comes now was held back as the beginning of a call, and nothing follows it."""
        return self._reader.is_cut and (self._rules.is_demanded or self.is_behind_call)

    def _is_dropped(self) -> bool:
        return not self._rules.is_parallel and self.num_calls > 0

    def _open(self) -> None:
        self.drop_space()
        self._is_open = True
        self.pieces.open_call(self._num_opened, self._new_id(), self._name or "")
        self._num_opened += 1
        self.is_first = False
        self._emit("".join(self._arguments))

    def _emit(self, text: str) -> None:
        """Emit arguments without the bracket that may close them, which `commit` emits.

        So the arguments of a call that breaks behind them are no JSON, and no client runs it.
        """
        text = self._closing + text
        self._closing = "}" if text.endswith("}") else ""
        if emitted := text.removesuffix("}"):
            self.pieces.arguments(self._num_opened - 1, emitted)
        self._reader.begin_record()

    def _reset(self) -> None:
        self._reader.end_record()
        self._name, self._is_open = None, False
        self._arguments, self._closing = [], ""
