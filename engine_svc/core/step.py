"""The interface between scheduler and runner: StepPlan, the work of a step, and StepResult, its results.

Plain columns. Knows no tensors, no request status and no wire.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from math import nan
from typing import Any

from engine_svc.core.extras import Extra, Extras
from engine_svc.core.sampling_params import SamplingParams

_NON_FINITE = "the model produced logits that are not finite"
BARRED = "the request's own rules leave no token to choose"


@dataclass(slots=True)
class AdmittedRequest:
    """A request that enters the batch, new or resumed, in full. Later plans have only changes."""

    request_id: str
    token_ids: list[int]  # every known token: prompt, then output if it is continued
    num_prompt_tokens: int
    sampling: SamplingParams
    # Per group, taken over from the prefix cache or kept; 0 where no layer reads again.
    block_ids: list[list[int]]
    extras: Extras = field(default_factory=dict)  # of features, fixed while the request lives
    cache_salt: str = ""  # what it produced may help only requests with the same; none if empty


@dataclass(slots=True)
class StepPlan:
    """The work of one step. Columns are parallel, one entry per row, in scheduling order.

    The runner frees the rows in `released`, then adds those in `admitted`, then runs the rows.
    Built by the scheduler, frozen at launch.
    """

    step_number: int
    released: list[str] = field(default_factory=list)  # finished, aborted or preempted since the last plan
    admitted: list[AdmittedRequest] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)  # to compute in this step, including drafts
    num_computed_tokens: list[int] = field(default_factory=list)  # with KV before this step
    new_block_ids: list[list[list[int]]] = field(default_factory=list)  # of a row, per group; [] = none
    draft_token_ids: list[list[int]] = field(default_factory=list)  # the last of the row's num_tokens
    samples: list[bool] = field(default_factory=list)  # False: a chunk that ends before the last known token
    preempted: list[str] = field(default_factory=list)  # in order of preemption, for logs and traces
    # Leading blocks that the tables of all rows share, per group; 0 for groups that do not read all tokens.
    num_common_blocks: list[int] = field(default_factory=list)  # [] = none
    extras: Extras = field(default_factory=dict)  # from features' scheduler half to their runner half

    @property
    def total_num_tokens(self) -> int:
        """Tokens of all rows, i.e. what the step spends of the token budget."""
        return sum(self.num_tokens)

    def withdraw(self, row: int) -> int:
        """Remove a row before launch, because its request is preempted; returns its number of tokens."""
        del self.request_ids[row], self.num_computed_tokens[row], self.new_block_ids[row]
        del self.draft_token_ids[row], self.samples[row]
        return self.num_tokens.pop(row)


@dataclass(slots=True)
class TokenLogprobs:
    """Logprobs of consecutive positions of one row, one entry per position."""

    logprobs: list[float]  # of the token at the position
    ranks: list[int]  # from 1: how many tokens of the vocabulary are at least as likely
    k: int = 0  # entries of each position in the two columns below
    top_token_ids: list[int] = field(default_factory=list)  # the most likely first, then requested ids
    top_logprobs: list[float] = field(default_factory=list)

    def part(self, first: int, end: int) -> TokenLogprobs:
        """The positions from `first` to `end`, in new lists."""
        top = slice(first * self.k, end * self.k)
        return TokenLogprobs(
            self.logprobs[first:end],
            self.ranks[first:end],
            self.k,
            self.top_token_ids[top],
            self.top_logprobs[top],
        )

    def widened(self, k: int) -> TokenLogprobs:
        """The same with `k` entries per position, no fewer than now; NaN and id 0 are padding."""
        num_missing = k - self.k
        if not num_missing:
            return self
        widened = TokenLogprobs(self.logprobs, self.ranks, k)
        for index in range(len(self.ranks)):
            entries = slice(index * self.k, (index + 1) * self.k)
            widened.top_token_ids += self.top_token_ids[entries] + [0] * num_missing
            widened.top_logprobs += self.top_logprobs[entries] + [nan] * num_missing
        return widened

    def extend(self, more: TokenLogprobs) -> None:
        """Append positions. If the numbers of entries per position differ, the smaller is padded."""
        if more.k != self.k:
            k = max(self.k, more.k)
            own, more = self.widened(k), more.widened(k)
            self.k, self.top_token_ids, self.top_logprobs = k, own.top_token_ids, own.top_logprobs
        self.logprobs += more.logprobs
        self.ranks += more.ranks
        self.top_token_ids += more.top_token_ids
        self.top_logprobs += more.top_logprobs


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Measured step time as a function of its number of positions.

    counts: numbers of positions or rows, ascending, from 1.
    seconds: of a step, by `counts`, with short contexts.
    seconds_per_read: added per position and per token of context.
    seconds_per_draw: added per position whose token is drawn.
    proposal_seconds: of a network to propose one draft per row by `counts`; () without one.
    seconds_per_drafted_step, seconds_per_drafted_row: of the host, added once if any row may have drafts, and
    for each row that may.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    seconds_per_read: float = 0.0
    seconds_per_draw: float = 0.0
    proposal_seconds: tuple[float, ...] = ()
    seconds_per_drafted_step: float = 0.0
    seconds_per_drafted_row: float = 0.0

    def of(self, num_positions: int) -> float:
        """Seconds of a step: linear between measurements, in proportion beyond them."""
        return self._between(self.seconds, num_positions)

    def of_proposals(self, num_rows: int) -> float:
        """Seconds to propose one draft for each of `num_rows` rows, likewise."""
        return self._between(self.proposal_seconds, num_rows) if num_rows and self.proposal_seconds else 0.0

    def _between(self, seconds: tuple[float, ...], num_positions: int) -> float:
        counts = self.counts
        if num_positions >= counts[-1]:
            return seconds[-1] * num_positions / counts[-1]
        after = min(max(bisect_left(counts, num_positions), 1), len(counts) - 1)
        first, last = counts[after - 1], counts[after]
        slope = (seconds[after] - seconds[after - 1]) / (last - first)
        return seconds[after - 1] + slope * (num_positions - first)


@dataclass(slots=True)
class StepResult:
    """The output of one step. `sampled` is parallel to the plan's rows; [] if the row did not sample."""

    step_number: int
    sampled: list[list[int]]  # accepted drafts, then one more token
    drafts: dict[str, list[int]] = field(default_factory=dict)  # proposals for the next step, by request id
    # Rows that end with an error: logits are not finite, or the request's own rules leave no token, or a
    # feature that the request uses raised, with what it raised. A feature may say why rules leave none.
    non_finite: list[int] = field(default_factory=list)
    barred: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row of the plan, of sampled tokens
    extras: dict[type[Extra], dict[int, Any]] = field(default_factory=dict)  # of features, by row of the plan
    num_drafts: list[int] = field(default_factory=list)  # of each row, that were verified; [] = as planned

    def faults(self) -> list[tuple[int, str]]:
        """The rows that end with an error, in order, each with its message."""
        if not self.non_finite and not self.barred and not self.failed:
            return []
        faults = dict.fromkeys(self.barred, BARRED) | dict.fromkeys(self.non_finite, _NON_FINITE)
        return sorted((faults | self.failed).items())

    def clear_faulty(self) -> None:
        """Remove all else that the step produced for rows that end with an error.

        Extras of a type with `stays_with_error` stay.
        """
        for row, _ in self.faults():
            self.sampled[row] = []
            self.logprobs.pop(row, None)
            for kind, by_row in self.extras.items():
                if not kind.stays_with_error:
                    by_row.pop(row, None)
