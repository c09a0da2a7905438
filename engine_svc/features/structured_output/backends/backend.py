"""The interface of grammar backends, in plain data and protocols.

A backend's results depend on constraint, vocabulary and tokens alone: limits are counted in work, never in
seconds, so that all ranks reach the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine_svc.features.structured_output.constraint import Constraint

if TYPE_CHECKING:
    from torch import Tensor

# Of a constraint: fuel and other limits end the work for it after some 10 ms.
MAX_SMALL_CHARS = 4096


class MatcherError(RuntimeError):
    """A matcher cannot continue: its request ends. No other matcher is affected."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a model's logits stand for. Ids behind the tokenizer's are never allowed."""

    tokenizer_json: str
    size: int
    eos_ids: tuple[int, ...]  # allowed where the output may end

    @property
    def num_words(self) -> int:
        """Words of 32 bits in one row of a mask."""
        return -(-self.size // 32)


class Matcher(Protocol):
    """The state of one output. Calls raise MatcherError once it cannot continue, e.g. out of fuel."""

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""

    @property
    def is_terminated(self) -> bool:
        """Whether nothing may follow but the end: an end token was accepted, or the language has no more."""

    def fill_mask(self, masks: Tensor, row: int) -> None:
        """Write the tokens allowed next. masks: [M, num_words] int32 on the CPU, rows contiguous."""

    def accept(self, token_ids: Sequence[int]) -> int:
        """Advance over the tokens that the language allows, and return how many; the state stays valid."""

    def rollback(self, num_tokens: int) -> None:
        """Forget the last accepted tokens."""

    def copy(self) -> Matcher:
        """An independent matcher in the same state."""


class CompiledGrammar(Protocol):
    """A constraint that is ready to use; immutable, shared by requests and threads."""

    @property
    def size_bytes(self) -> int:
        """Estimate of its memory, for limits of caches."""

    def matcher(self) -> Matcher:
        """A matcher of an empty output."""


class GrammarBackend(Protocol):
    """Compiles constraints for one vocabulary."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def special_ids(self) -> dict[str, int]:
        """The ids of tokens that grammars name by id, by their texts."""

    def compile(self, constraint: Constraint, grammar: str = "") -> CompiledGrammar:
        """Raises GrammarError, of a limit GrammarTooComplex.

        grammar: the constraint in the backend's own form, if it was written before.
        """

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: Tensor) -> list[int]:
        """`fill_mask` of several matchers, in parallel; returns the indices of those that failed."""


def check_masks(masks: Tensor, num_words: int) -> None:
    """Backends write to memory by address: refuse what is not [M, num_words] int32 on the CPU, contiguous."""
    if masks.ndim != 2 or masks.shape[1] != num_words or not masks.is_contiguous():
        raise ValueError(f"masks have shape {tuple(masks.shape)}, contiguous {num_words} words are needed")
    if str(masks.dtype) != "torch.int32" or masks.device.type != "cpu":
        raise ValueError(f"masks are {masks.dtype} on {masks.device}, int32 on the CPU is needed")
