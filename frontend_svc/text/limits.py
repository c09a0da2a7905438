"""The limits of requests, and the collection of their violations into one error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from frontend_svc.text.model import ServedModel
from triptych.common.v1 import sampling_pb2
from triptych_kit.errors import InvalidArgument
from triptych_kit.rules import (
    MAX_LOGPROBS,
    MAX_N,
    MODEL_LENGTH,
    VOCABULARY,
    Limits,
    Violation,
    rules_of,
    shown,
)

# More than a status can carry. One request can have millions of violations.
_MAX_FOUND = 64
_SAMPLING = sampling_pb2.SamplingParams


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits that an operator configures; all others are rules of the contract.

    max_logprobs: -1 is the vocabulary size.  stream_interval: a minimum, smaller requested values are raised
    to it instead of refused.
    """

    max_n: int = int(rules_of(_SAMPLING, "n").maximum)
    max_logprobs: int = int(rules_of(_SAMPLING, "logprobs").maximum)
    stream_interval: int = 1

    def named(self, model: ServedModel) -> Limits:
        """The limits that rules of the contract name."""
        return {
            VOCABULARY: model.vocab_size,
            MODEL_LENGTH: model.max_model_len,
            MAX_N: self.max_n,
            MAX_LOGPROBS: self.max_logprobs,
        }


class Violations:
    """Violations of limits in one request, reported together. Only the first 64 are kept."""

    def __init__(self) -> None:
        self._entries: list[tuple[str, str]] = []

    @property
    def num_found(self) -> int:
        """Number of violations that are kept."""
        return len(self._entries)

    def add(self, field: str, value: object, rule: str, *, index: int | None = None) -> None:
        """Record that `field`, or its entry at `index`, is `value`; `rule` is like `must be in 0..2`.

        A value of None means that the field is not set.
        """
        if len(self._entries) < _MAX_FOUND:
            self._entries.append((field, f"{_field_path(field, index)} is {shown(value)}, {rule}"))

    def extend(self, violations: Iterable[Violation]) -> None:
        """Record violations of rules of the contract."""
        for violation in violations:
            if len(self._entries) < _MAX_FOUND:
                self._entries.append((violation.field, violation.message))

    def need_count(
        self, field: str, num: int, unit: str, minimum: int, maximum: int, *, index: int | None = None
    ) -> bool:
        """Record a violation unless `field`, or its entry at `index`, has `minimum` to `maximum` of `unit`.

        Returns whether it has: if there are too many entries, the caller need not check them.
        """
        is_fine = minimum <= num <= maximum
        if not is_fine and len(self._entries) < _MAX_FOUND:
            limit = f"at most {maximum}" if minimum == 0 else f"{minimum}..{maximum}"
            self._entries.append((field, f"{_field_path(field, index)} has {num} {unit}, must have {limit}"))
        return is_fine

    def need_ids(self, field: str, token_ids: Sequence[int], vocab_size: int, *, first: int = 0) -> bool:
        """Record a violation for the first id that is not in the vocabulary. Returns whether all are.

        first: the index of the first of `token_ids` in the field.
        """
        if not token_ids or max(token_ids) < vocab_size:
            return True
        index = next(index for index, token_id in enumerate(token_ids) if token_id >= vocab_size)
        rule = f"must be below the vocabulary size of {vocab_size}"
        self.add(field, token_ids[index], rule, index=first + index)
        return False

    def need(self, is_fine: bool, field: str, value: object, rule: str, *, index: int | None = None) -> None:
        """Record a violation unless `is_fine`."""
        if not is_fine:
            self.add(field, value, rule, index=index)

    def need_enum(self, field: str, value: int, names: EnumTypeWrapper, values: Iterable[int]) -> None:
        """Record a violation unless `value` is one of `values` of an enum; it lists their names."""
        allowed = tuple(values)
        if value not in allowed:
            self.add(field, value, f"must be one of {', '.join(map(names.Name, allowed))}")

    def raise_if_any(
        self, reason: str = "INVALID_REQUEST", metadata: Mapping[str, str] | None = None
    ) -> None:
        """Raise InvalidArgument that lists all violations, if there are any."""
        if self._entries:
            message = "; ".join(description for _, description in self._entries)
            raise InvalidArgument(message, reason=reason, metadata=metadata, violations=self._entries)


def _field_path(field: str, index: int | None) -> str:
    return field if index is None else f"{field}[{index}]"
