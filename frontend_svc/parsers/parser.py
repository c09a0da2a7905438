"""The pieces of a parsed model output, and the protocols of parsers and formats. Knows no format."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

_MISTRAL_ID_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """New text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """New text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A call, or more of its arguments: `id` and `name` are set in its first piece and empty afterwards.

    The `arguments_json` of all pieces of one `index`, joined, are the arguments as the model wrote them. The
    last piece of a call that turned out to be malformed or was cut off `is_incomplete`: its arguments are not
    whole.
    """

    index: int
    id: str
    name: str
    arguments_json: str
    is_incomplete: bool = False


Piece: TypeAlias = ContentPiece | ReasoningPiece | ToolCallPiece


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls are accepted, and how they are emitted.

    A call of a name that is not in `tool_names` is text. Without `is_parallel` only the first call of a
    message is emitted, and further ones are dropped. `new_id` creates the id of a call; None: the format's
    own function.

    With `streams_arguments` a call is emitted as soon as its arguments begin. If it turns out to be malformed
    later, the emitted part stays, marked as incomplete, and the rest is content. Without it, a call is
    emitted once it is complete, and a malformed one is content from its first character. Either way the call
    in which an output was cut off is emitted with its arguments up to there, marked as incomplete.

    `is_continued`: the message began in the prompt, so that no call stands at its beginning.

    `opening`: text that every call begins with, as a grammar holds to their schemas only calls that do; what
    else looks like a call is text.

    `is_demanded`: the message is calls, and no text.
    """

    tool_names: frozenset[str]
    is_parallel: bool = True
    streams_arguments: bool = True
    is_continued: bool = False
    opening: str = ""
    is_demanded: bool = False
    new_id: Callable[[], str] | None = None


class PieceParser(Protocol):
    """Parses text incrementally. The joined pieces do not depend on how the text was split.

    feed: adds text; returns the pieces that became certain, in order.
    finish: returns the pieces held back, once no more text comes. Called once. `is_cut`: the model did not
    end the text itself.
    """

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self, *, is_cut: bool = False) -> list[Piece]: ...


class ToolParser(PieceParser, Protocol):
    """Finds the calls in a text; everything else is content."""

    @property
    def num_calls(self) -> int: ...  # complete calls so far


class ReasoningParser(PieceParser, Protocol):
    """Separates the reasoning in a text from the rest, which is content."""


class Format(Protocol):
    """How one family of models marks parts of its text.

    name: its name in options.
    markers: texts that may be special tokens and that the parser must see.
    needs_special_tokens: whether text must be detokenized with the `markers` shown.
    """

    @property
    def name(self) -> str: ...

    @property
    def markers(self) -> frozenset[str]: ...

    @property
    def needs_special_tokens(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CallForm:
    """What grammars need to know of a format: a call is its `forced_prefix`, arguments in JSON, and `end`.

    trigger: the beginning of each call, and of nothing else. separator: between two calls. With
    `begins_list`, the beginning of each `forced_prefix`, and `ends_list` calls stand in one list.
    has_keywords: arguments are Python's keyword arguments, with their values in JSON.

    answer: the beginning of a text in place of calls. text: its pattern, where triggers cannot separate calls
    from text: then an output is calls or such a text. preface: texts that begin and end a text of the
    pattern `text` that may come before both.
    """

    trigger: str
    end: str
    separator: str = ""
    begins_list: str = ""
    ends_list: str = ""
    has_keywords: bool = False
    answer: str = ""
    text: str = ""
    preface: tuple[str, str] | None = None


class ToolParserFormat(Format, Protocol):
    """The format in which one family of models writes tool calls.

    includes_reasoning: whether its parser also finds the reasoning, so that no reasoning parser is used.
    forced_prefix: text at the end of the prompt that opens a call of this tool, or of any tool.
    open: a parser for one message; its `forced_prefix` is the one at the end of the prompt.
    """

    @property
    def includes_reasoning(self) -> bool: ...

    @property
    def form(self) -> CallForm: ...

    def forced_prefix(self, tool_name: str | None) -> str: ...

    def open(self, rules: CallRules, *, forced_prefix: str = "") -> ToolParser: ...


class ReasoningFormat(Format, Protocol):
    """The format in which one family of models writes its reasoning.

    block: the texts that open and close a block of reasoning, for the thinking budget.
    closing: text that ends the reasoning opened by `prompt`, to precede a forced call; may be empty.
    open: a parser for the message that follows `prompt`; only the end of `prompt` matters.
    """

    @property
    def block(self) -> tuple[str, str]: ...

    def closing(self, prompt: str) -> str: ...

    def open(self, prompt: str) -> ReasoningParser: ...


def new_call_id() -> str:
    """A random id in the form that most clients expect."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """A random id in the form that the templates of Mistral's models require: nine letters and digits."""
    return "".join(secrets.choice(_MISTRAL_ID_LETTERS) for _ in range(9))
