"""What the feature attaches to requests and results."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import ClassVar

from triptych_kit.grammars.constraint import Constraint, ConstraintKind, Whitespace

# The default one first.
BACKENDS = ("llguidance", "xgrammar")

_TIMES = struct.Struct("<qq")


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The language of a request's output, and when it begins to hold.

    reasoning_end: the ids after which it does; empty: from the first token.
    eos_token_ids: those that end the output, also with `ignore_eos`.
    """

    constraint: Constraint
    backend: str = BACKENDS[0]
    reasoning_end: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    blocker: ClassVar[str] = "grammar"
    rules: ClassVar[tuple[str, ...]] = ("structured_output",)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}, must be one of {', '.join(BACKENDS)}")

    @property
    def digest(self) -> bytes:
        """Equal for requests that need the same grammar."""
        return hashlib.sha256(json.dumps([self.backend, *_fields_of(self.constraint)]).encode()).digest()

    def encode(self) -> bytes:
        fields = [*_fields_of(self.constraint), self.backend, self.reasoning_end, self.eos_token_ids]
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> StructuredOutput:
        kind, text, choices, is_any, pattern, is_open, is_lenient, *rest = json.loads(data)
        backend, reasoning_end, eos_token_ids = rest
        constraint = Constraint(
            ConstraintKind(kind),
            text,
            tuple(choices),
            whitespace=Whitespace(is_any, pattern),
            has_additional_properties=is_open,
            is_lenient=is_lenient,
        )
        return cls(constraint, backend, tuple(reasoning_end), tuple(eos_token_ids))


def _fields_of(constraint: Constraint) -> list[object]:
    return [
        constraint.kind.value,
        constraint.text,
        constraint.choices,
        constraint.whitespace.is_any,
        constraint.whitespace.pattern,
        constraint.has_additional_properties,
        constraint.is_lenient,
    ]


@dataclass(frozen=True, slots=True)
class GrammarTimes:
    """What grammars cost since the last step that reported it; no output extra, as the engine keeps it.

    compile_us: of this row's grammar; 0: it was cached, -1: reported before.  masks_us: of all rows of the
    step; -1: reported with another row.
    """

    compile_us: int
    masks_us: int

    def encode(self) -> bytes:
        return _TIMES.pack(self.compile_us, self.masks_us)

    @classmethod
    def decode(cls, data: bytes) -> GrammarTimes:
        return cls(*_TIMES.unpack(data))


EXTRAS = (StructuredOutput, GrammarTimes)
