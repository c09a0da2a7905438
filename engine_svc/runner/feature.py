"""The runner's half of a feature: its stages of a step on the device, and the rows that use it.

The runner knows no feature. What a stage raises ends the rows that use the feature, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine_svc.core.errors import DeviceFull, DeviceLost, PeersLost, describe_failure
from engine_svc.core.extras import Extra, Extras
from engine_svc.core.step import AdmittedRequest
from engine_svc.model.context import ForwardContext
from engine_svc.model.decoder import Model
from engine_svc.runner.failures import translated
from engine_svc.runner.input_batch import DraftEntries, StepInputs
from engine_svc.runner.sampling.transfer import Ints
from triptych_kernels import Ops

# What a stage adds to the step's result: extras by row of the batch, or why the request of a row ends with an
# error. Called when the device is done.
PendingPart = Callable[[], Mapping[int, Extra | str]]


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """The surroundings of a runner feature. token_ids: [max_num_seqs, L] int32, of all rows, on the device.

    model: not to be kept, as that would hold the weights while the engine sleeps.
    eos_token_ids: the ends of sequences that the model knows; none where it has no such token.
    """

    model: Model
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    max_num_seqs: int
    ops: Ops
    token_ids: Tensor
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LogitRows:
    """The logits of a step that belong to rows with one feature. The same object while these stay the same.

    entries: [M] int64, their indices in the logits.  rows: [M] int64, of the batch.
    """

    entries: Ints
    rows: Ints


@dataclass(frozen=True, slots=True)
class HostTokens:
    """New tokens of the rows with one feature since its last `on_tokens`, on the host.

    rows, token_ids: [K] int64, tokens that were sampled for these rows of the batch, each once.
    sampling_rows, positions: [M] int64, rows that sample in this step, once for each position at which they
    do, which follow each other.  drafts: [M] int64, the draft before each position; -1 at a row's first.
    """

    rows: Ints
    token_ids: Ints
    sampling_rows: Ints
    positions: Ints
    drafts: Ints


class RunnerFeature:
    """One feature on the device, in every rank. Override the stages that it needs, which come in this order.

    State per row is a function of the request and its tokens, so that a request continues anywhere.
    """

    prepares: type[Extra] | None = None  # the extra that `prepare` takes, one with a `blocker`
    every_stage = False  # of a pipeline; False: one that prepares is in the last alone, which chooses tokens

    def prepare(self, extra: Any) -> Any:
        """Do slow work for a request that is blocked meanwhile, in a thread beside the steps.

        The result replaces the extra for `uses` and `add_row`, and is kept until the request ends.
        RequestFailed ends the request with its status; other errors as internal ones. The call must be
        thread-safe with the stages and with other calls.
        """
        raise NotImplementedError

    def prepare_at_once(self, extra: Any) -> Any:
        """What `prepare` would return, if it is at hand; None: `prepare` is to be called. Must not wait.

        Thread-safe, as `prepare`, but called in the thread that asks for the preparation.
        """
        return None

    def release(self, prepared: Any) -> None:
        """A request for which `prepare` has returned this has ended. Thread-safe, as `prepare`.

        Its row may still be there, until the next step.
        """

    def stop_preparing(self) -> None:
        """Release what `prepare` uses; it is called no more."""

    def is_slow_to_prepare(self, extra: Any) -> bool:
        """Whether it may take far longer than others, which then do not wait for it. Cheap."""
        return False

    def on_model(self, model: Model) -> None:
        """The weights were loaded again. Not to be kept, as in the context."""

    def collectives(self) -> Mapping[str, Callable[..., object]]:
        """Functions that an operator may have every rank run, by the names that its options declare.

        Called with the arguments by name; a ValueError or OSError is a refusal.
        """
        return {}

    def uses(self, admitted: AdmittedRequest) -> bool:
        """Whether the request uses the feature. Other rows cost it nothing."""
        raise NotImplementedError

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        """Assign `row` to the request, which may have output tokens already."""

    def remove_row(self, row: int) -> None: ...

    def example(self) -> Extra | None:
        """An extra of a request that uses all kernels of the feature, which are then compiled in advance."""
        return None

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        """May change what the forward reads. `inputs` has what the scheduler's half attached to the plan."""

    def extra_positions(self, inputs: StepInputs) -> Ints | None:
        """Indices of the step's tokens whose logits it needs besides those of rows that sample, if any.

        Tensor-parallel ranks exchange these logits: where an earlier stage has raised in one rank alone, that
        fails, and the engine loses its ranks.
        """

    def on_tokens(self, tokens: HostTokens) -> Mapping[int, str] | None:
        """The tokens of the step before are on the host, and the forward of this step runs meanwhile.

        For what `apply` needs and takes time. On a CPU in another thread: it must not use the step's tensors.
        On a GPU, a step in which such rows sample waits for the tokens of the one before, once its forward is
        launched. `add_row` has all tokens until then. Returns rows that cannot go on, with the reason for the
        client, a `RuleConflict` where the request is at fault. Where only a draft cannot be followed, `apply`
        excludes every token after it: the next step comes back to that position without the draft.
        """

    def after_forward(self, inputs: StepInputs, hidden: Tensor, model: Model) -> PendingPart | None:
        """A result from the step's hidden states [T, H], those that logits are computed from.

        Not called in an early stage of a pipeline. model: not to be kept.
        """

    def before_sampling(self, inputs: StepInputs, logits: Tensor) -> PendingPart | None:
        """The model's own logits [M, V] of its extra positions."""

    def apply(self, logits: Tensor, logit_rows: LogitRows, positions: Ints, token_ids: Tensor) -> None:
        """Change logits [N, V] fp32, contiguous, in place, at `logit_rows.entries` alone.

        positions: [M], of the tokens to be sampled.  token_ids: [max_num_seqs, L] int32, of which
        token_ids[logit_rows.rows[m], :positions[m]] are known, or drafts. A row comes once for each position.
        """

    def after_sampling(self, logits: Tensor, token_ids: Tensor, logit_rows: LogitRows) -> PendingPart | None:
        """token_ids: [N] int64, sampled from the logits [N, V]; those after a draft may not count."""


class RuleConflict(str):
    """Why the own rules of a request leave it no token."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class FeaturePart:
    """A part of a step's result that one feature has yet to produce for `rows` of the batch."""

    feature: str
    rows: Sequence[int]
    read: PendingPart


_NO_ROWS: Ints = np.zeros(0, dtype=np.int64)
_STAGES = (
    "on_model",
    "before_forward",
    "extra_positions",
    "on_tokens",
    "after_forward",
    "apply",
    "after_sampling",
)


@dataclass(slots=True)
class _Unread:
    """Tokens of one step that a feature has not been given. read: waits until they are on the host.

    entries, rows: [K], of the rows with the feature; -1 where the row has left the batch. Tokens that do not
    count are -1.
    """

    entries: Ints
    rows: Ints
    read: Callable[[], Ints]


class RunnerFeatures:
    """The features of a runner, in the order of application, and which rows use which."""

    def __init__(self, features: Sequence[RunnerFeature], max_num_seqs: int) -> None:
        self._features = tuple(features)
        # Features with each stage, by index.
        self._with_stage = {
            stage: [index for index, feature in enumerate(features) if _overrides(feature, stage)]
            for stage in _STAGES
        }
        readers = {*self._with_stage["apply"], *self._with_stage["after_sampling"]}
        self._readers = [self._features[index] for index in readers]
        self._uses = np.zeros((len(features), max_num_seqs), dtype=bool)
        self._num_rows = [0] * len(features)
        self._failed: dict[int, str] = {}  # by row, with what a stage raised
        # Of the last step: consecutive steps mostly have the same rows.
        self._latest_rows: Ints | None = None
        self._latest: dict[int, LogitRows] = {}
        self._unread: dict[int, list[_Unread]] = {index: [] for index in self._with_stage["on_tokens"]}

    def add_row(self, row: int, admitted: AdmittedRequest) -> None:
        for index, feature in enumerate(self._features):
            if not feature.uses(admitted):
                continue
            self._uses[index, row] = True
            self._num_rows[index] += 1
            self._latest_rows = None
            with self._errors_end(index, (row,)):
                extra = admitted.extras.get(feature.prepares) if feature.prepares is not None else None
                if isinstance(extra, Extra) and extra.blocker:
                    raise RuntimeError(f"{type(extra).__name__} was not prepared")
                feature.add_row(row, admitted)

    def on_model(self, model: Model) -> None:
        for index in self._with_stage["on_model"]:
            self._features[index].on_model(model)

    def collectives(self) -> dict[str, Callable[..., object]]:
        return {name: run for feature in self._features for name, run in feature.collectives().items()}

    def remove_row(self, row: int) -> None:
        self._failed.pop(row, None)
        for index in self._uses[:, row].nonzero()[0].tolist():
            self._stop_using(index, row)

    def examples(self) -> Extras:
        """Extras of a request that uses all features with kernels of their own, prepared where needed."""
        return {
            type(extra): feature.prepare(extra) if feature.prepares is type(extra) else extra
            for feature in self._features
            if (extra := feature.example()) is not None
        }

    def reads_logits(self, admitted: AdmittedRequest) -> bool:
        """Whether more than the largest logit of its row is needed.

        Also if a stage raised for it: ranks in which none did exchange as many logits.
        """
        return any(feature.uses(admitted) for feature in self._readers)

    def failed(self, rows: Ints) -> dict[int, str]:
        """Messages of the errors that a stage raised for `rows`, by index."""
        if not self._failed:
            return {}
        return {index: self._failed[row] for index, row in enumerate(rows.tolist()) if row in self._failed}

    def before_forward(self, inputs: StepInputs, context: ForwardContext) -> None:
        for index in self._used("before_forward"):
            # Without a context unless it raises: code that runs once a step is not in the caches, so that
            # each call takes microseconds.
            try:
                self._features[index].before_forward(inputs, context)
            except Exception:
                with self._errors_end(index, inputs.rows):
                    raise

    def extra_positions(self, inputs: StepInputs) -> list[tuple[int, Ints]]:
        """The tokens whose logits features need, each with the index of its feature."""
        positions_of = []
        for index in self._used("extra_positions"):
            with self._errors_end(index, self._rows_of(index, inputs.rows)):
                positions = self._features[index].extra_positions(inputs)
                if positions is not None:
                    positions_of.append((index, positions))
        return positions_of

    def reads_tokens(self, rows: Ints) -> bool:
        """Whether `on_tokens` is to be called in a step in which these rows sample."""
        return any(self._uses[index, rows].any() for index in self._used("on_tokens"))

    def reads_hidden(self, rows: Ints) -> bool:
        """Whether `after_forward` is to be called in a step with these rows."""
        used = self._used("after_forward")
        return bool(used) and any(self._uses[index, rows].any() for index in used)

    def after_forward(self, inputs: StepInputs, hidden: Tensor, model: Model) -> list[FeaturePart]:
        """hidden: [T, H], of the step's tokens."""
        parts: list[FeaturePart] = []
        for index in self._used("after_forward"):
            rows = self._rows_of(index, inputs.rows)
            if rows:
                with self._errors_end(index, rows):
                    read = self._features[index].after_forward(inputs, hidden, model)
                    self._add(parts, index, rows, read)
        return parts

    def on_tokens(self, rows: Ints, positions: Ints, drafts: DraftEntries | None = None) -> None:
        """rows: [N], of the batch, that sample in this step, once for each of their positions [N]."""
        for index in self._used("on_tokens"):
            entries = self._uses[index, rows].nonzero()[0]
            if not len(entries):
                continue
            preceding = np.full(len(rows), -1) if drafts is None else drafts.preceding
            sampling = rows[entries], positions[entries], preceding[entries]
            tokens = HostTokens(*self._take_unread(index), *sampling)
            using = {*tokens.rows.tolist(), *tokens.sampling_rows.tolist()}
            with self._errors_end(index, sorted(using)):
                for row, why in (self._features[index].on_tokens(tokens) or {}).items():
                    self._failed[row] = why
                    self._stop_using(index, row)

    def keep_sampled(self, rows: Ints, read: Callable[[], Ints]) -> None:
        """A step was launched in which these rows sample. read: [N], waits for their tokens."""
        for index in self._used("on_tokens"):
            entries = self._uses[index, rows].nonzero()[0]
            if len(entries):
                self._unread[index].append(_Unread(entries, rows[entries], read))

    def _take_unread(self, index: int) -> tuple[Ints, Ints]:
        """Rows, and the tokens that were sampled for them."""
        unread, self._unread[index] = self._unread[index], []
        rows = np.concatenate([_NO_ROWS, *(one.rows for one in unread)])
        token_ids = np.concatenate([_NO_ROWS, *(one.read()[one.entries] for one in unread)])
        is_there = (rows >= 0) & (token_ids >= 0)
        return rows[is_there], token_ids[is_there]

    def before_sampling(
        self, inputs: StepInputs, logits: Tensor, extra: Sequence[tuple[int, Ints]]
    ) -> list[FeaturePart]:
        """logits: [M, V], of all extra positions, feature by feature."""
        parts: list[FeaturePart] = []
        for (index, _), own in zip(extra, logits.split([len(one) for _, one in extra]), strict=True):
            rows = self._rows_of(index, inputs.rows)
            # None where an earlier stage of this step has raised.
            if not rows:
                continue
            with self._errors_end(index, rows):
                self._add(parts, index, rows, self._features[index].before_sampling(inputs, own))
        return parts

    def apply(self, logits: Tensor, rows: Ints, positions: Ints, token_ids: Tensor) -> None:
        """logits: [N, V] of the batch's `rows`, whose next tokens get `positions`."""
        for index in self._used("apply"):
            logit_rows = self._logit_rows(index, rows)
            if len(logit_rows.rows):
                with self._errors_end(index, logit_rows.rows.tolist()):
                    self._features[index].apply(logits, logit_rows, positions[logit_rows.entries], token_ids)

    def after_sampling(self, logits: Tensor, token_ids: Tensor, rows: Ints) -> list[FeaturePart]:
        """token_ids: [N] int64, sampled for the batch's `rows` from logits [N, V]."""
        parts: list[FeaturePart] = []
        for index in self._used("after_sampling"):
            logit_rows = self._logit_rows(index, rows)
            if len(logit_rows.rows):
                using = logit_rows.rows.tolist()
                with self._errors_end(index, using):
                    self._add(
                        parts,
                        index,
                        using,
                        self._features[index].after_sampling(logits, token_ids, logit_rows),
                    )
        return parts

    def _add(
        self, parts: list[FeaturePart], index: int, rows: Sequence[int], read: PendingPart | None
    ) -> None:
        if read is not None:
            parts.append(FeaturePart(_name(self._features[index]), rows, read))

    def _used(self, stage: str) -> list[int]:
        """Features with this stage and with rows."""
        return [index for index in self._with_stage[stage] if self._num_rows[index]]

    def _rows_of(self, index: int, rows: Ints) -> list[int]:
        using: list[int] = rows[self._uses[index, rows]].tolist()
        return using

    def _logit_rows(self, index: int, rows: Ints) -> LogitRows:
        if self._latest_rows is not rows:
            self._latest_rows, self._latest = rows, {}
        if index not in self._latest:
            entries = self._uses[index, rows].nonzero()[0]
            self._latest[index] = LogitRows(entries, rows[entries])
        return self._latest[index]

    @contextmanager
    def _errors_end(self, index: int, rows: Sequence[int] | Ints) -> Iterator[None]:
        """Errors of a stage end those of `rows` with the feature. Those of the device are no fault of it."""
        try:
            yield
        except Exception as error:
            if is_of_device(error):
                raise
            using = self._rows_of(index, np.unique(np.asarray(rows, dtype=np.int64)))
            self._failed |= dict.fromkeys(using, describe_failure(_name(self._features[index]), error))
            for row in using:
                self._stop_using(index, row)

    def _stop_using(self, index: int, row: int) -> None:
        self._uses[index, row] = False
        self._num_rows[index] -= 1
        self._latest_rows = None
        for unread in self._unread.get(index, ()):
            unread.rows[unread.rows == row] = -1
        if index in self._unread and not self._num_rows[index]:
            self._unread[index].clear()
        with self._errors_end(index, ()):
            self._features[index].remove_row(row)


def is_of_device(error: Exception) -> bool:
    """Whether the device or another rank is at fault, and so the whole step has failed."""
    cause = translated(error) if isinstance(error, RuntimeError | MemoryError) else error
    return isinstance(cause, DeviceLost | DeviceFull | PeersLost)


def _name(feature: RunnerFeature) -> str:
    return type(feature).__name__


def _overrides(feature: RunnerFeature, stage: str) -> bool:
    return getattr(type(feature), stage) is not getattr(RunnerFeature, stage)
