"""Constraints on outputs, and the errors of one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

_MAX_ERROR_CHARS = 1000


class GrammarError(ValueError):
    """The constraint is not one that the backend enforces; the message names what it refuses."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


class GrammarNotEnforced(GrammarError):
    """No backend enforces a keyword, which the message names."""


class GrammarTooComplex(GrammarError):
    """A limit on the work of a constraint was reached. It says nothing about another backend or limit."""


def shortened(message: str) -> str:
    """Without the middle of a long message, which quotes the constraint."""
    if len(message) <= _MAX_ERROR_CHARS:
        return message
    half = _MAX_ERROR_CHARS // 2
    return f"{message[:half]} ... {message[-half:]}"


class ConstraintKind(Enum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


# Characters in a row. Without a limit small models write white space until `max_tokens`.
MAX_WHITESPACE = 32


class Spacing(Enum):
    """White space between the parts of JSON."""

    COMPACT = "compact"  # at most one space, behind commas and colons alone
    SINGLE = "single"  # one space there, as json.dumps writes it
    FREE = "free"  # up to MAX_WHITESPACE between any two parts


@dataclass(frozen=True, slots=True)
class Whitespace:
    spacing: Spacing = Spacing.COMPACT
    pattern: str = ""  # of all white space; "": as `spacing` says


@dataclass(frozen=True, slots=True)
class Constraint:
    """The language of an output. `text` is the schema, regular expression, grammar or document of tags."""

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()
    whitespace: Whitespace = Whitespace()
    has_additional_properties: bool = True  # of objects whose schema does not say
    is_lenient: bool = False  # leave out keywords of JSON Schema that the backend does not know

    @property
    def num_chars(self) -> int:
        return len(self.text) + sum(map(len, self.choices))
