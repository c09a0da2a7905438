"""The pieces a model's text is taken apart into, and what a format says of itself. Knows no format."""

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
    """A call, or more of its arguments: `id` and `name` come with its first piece and are empty afterwards.

    The `arguments_json` of all pieces of one `index`, joined, are the arguments as the model wrote them.
    """

    index: int
    id: str
    name: str
    arguments_json: str


Piece: TypeAlias = ContentPiece | ReasoningPiece | ToolCallPiece


@dataclass(frozen=True, slots=True)
class CallRules:
    """Which calls are taken, and how they are told.

    A call of a name that is not in `tool_names` is text. Without `is_parallel` only the first call of a
    message is told, and further ones are dropped. `new_id` makes the id of a call; None: the format's way.

    With `streams_arguments` a call is told as soon as its arguments begin, so that one which turns out to
    be malformed later cannot be taken back: what was told stays, and the rest is content. Without, a call is
    told once it is whole, and a malformed one is content from its first character.
    """

    tool_names: frozenset[str]
    is_parallel: bool = True
    streams_arguments: bool = True
    new_id: Callable[[], str] | None = None


class PieceParser(Protocol):
    """Takes a text apart as it grows. The pieces do not depend on how the text was cut, once joined."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that became certain with `text`, in order."""

    def finish(self) -> list[Piece]:
        """What was held back, once it is known that no more text comes. To be called once."""


class ToolParser(PieceParser, Protocol):
    """Finds the calls in a text; everything else is content."""

    @property
    def num_calls(self) -> int:
        """How many calls were told and are whole."""


class ReasoningParser(PieceParser, Protocol):
    """Tells the reasoning in a text from the rest, which is content."""


class ToolParserFormat(Protocol):
    """How one family of models writes tool calls."""

    @property
    def name(self) -> str:
        """What the format is called in options."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts that may be special tokens, which the parser must see."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must be detokenized with the `markers` shown."""

    @property
    def includes_reasoning(self) -> bool:
        """Whether its parser tells the reasoning as well, so that no other comes before it."""

    def forced_prefix(self, tool_name: str | None) -> str:
        """What opens a call of this tool, or of any, where the prompt ends."""

    def open(self, rules: CallRules, *, forced_prefix: str = "") -> ToolParser:
        """A parser for one message. `forced_prefix` is what the prompt's end has already opened."""


class ReasoningFormat(Protocol):
    """How one family of models writes its reasoning."""

    @property
    def name(self) -> str:
        """What the format is called in options."""

    @property
    def markers(self) -> frozenset[str]:
        """Texts that may be special tokens, which the parser must see."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether the text must be detokenized with the `markers` shown."""

    @property
    def block(self) -> tuple[str, str]:
        """The texts that open and close a block of reasoning, for a budget of tokens within."""

    def closing(self, prompt: str) -> str:
        """What ends the reasoning that `prompt` has opened, to stand before a forced call; empty: nothing."""

    def open(self, prompt: str) -> ReasoningParser:
        """A parser for the message that follows `prompt`, of which only the end is looked at."""


def new_call_id() -> str:
    """A random id as most clients expect it."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """A random id as the templates of Mistral's models demand it: nine letters and digits."""
    return "".join(secrets.choice(_MISTRAL_ID_LETTERS) for _ in range(9))
