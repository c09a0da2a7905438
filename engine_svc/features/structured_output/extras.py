"""The language of a request's output, and the times that grammars took in a rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from engine_svc.core.binary_form import form_of
from engine_svc.core.extras import Extra
from engine_svc.features.structured_output.constraint import Constraint
from triptych_kit.subsequences import end_of_first

# The default one first.
BACKENDS = ("llguidance", "xgrammar")

_CONSTRAINT_FORM = form_of(Constraint)


@dataclass(frozen=True, slots=True)
class StructuredOutput(Extra):
    """The language of a request's output as its client wrote it, and when it begins to hold.

    backends: those that may be chosen, the first one that enforces everything is.
    reasoning_end: the ids after which it does; empty: from the first token.
    reasoning_start: the ids that may open the reasoning; an output that begins otherwise has none, and the
    language holds from its first token. Empty: the output begins within the reasoning, if it has an end.
    eos_token_ids: those that end the output, also with `ignore_eos`.
    """

    constraint: Constraint
    backends: tuple[str, ...] = BACKENDS[:1]
    reasoning_end: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    reasoning_start: tuple[int, ...] = ()
    blocker: ClassVar[str] = "grammar"
    rules: ClassVar[tuple[str, ...]] = ("structured_output",)
    is_slow_at_first: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.backends or not set(self.backends) <= set(BACKENDS):
            raise ValueError(f"backends are {self.backends}, must be some of {', '.join(BACKENDS)}")

    def begin_in(self, output_token_ids: Sequence[int]) -> int:
        """The index of the output from which the language holds, -1 if it has not begun."""
        start = self.reasoning_start
        if start and tuple(output_token_ids[: len(start)]) != start:
            return 0
        return end_of_first(output_token_ids, self.reasoning_end)

    @property
    def digest(self) -> bytes:
        """Equal for requests that need the same grammar."""
        name = ",".join(self.backends)
        return hashlib.sha256(name.encode() + _CONSTRAINT_FORM.encode(self.constraint)).digest()


@dataclass(frozen=True, slots=True)
class GrammarTimes(Extra):
    """Times of grammars since the last step that reported them; no output extra, as the engine keeps them.

    compile_us: of this row's grammar; 0: it was cached, -1: reported before.  masks_us: of all rows of the
    step; -1: reported with another row.
    """

    compile_us: int
    masks_us: int


EXTRAS = (StructuredOutput, GrammarTimes)
