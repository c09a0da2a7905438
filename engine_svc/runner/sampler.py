"""Chooses tokens from logits by each row's sampling parameters. Noise is a pure function of (seed, position).

Nothing here waits for the device: which ops run depends only on the parameters of the rows.
Knows no scheduler, no blocks and no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from engine_svc.core.step import AdmittedRequest
from engine_svc.model.decoder import Largest
from engine_svc.runner.feature import FeaturePart, RunnerFeatures
from engine_svc.runner.sampling.logprobs import LogprobSpecs, SampledLogprobs
from engine_svc.runner.sampling.parameters import DrawParameters
from engine_svc.runner.sampling.transfer import Ints, to_device
from triptych_kernels import Ops, uniform_noise
from triptych_kernels.reference.sampling import MIN_TEMPERATURE, kept_weights


class LogprobsMode(Enum):
    """The source of returned logprobs: from the logits before all changes or after, normalized or not.

    After all changes, excluded tokens have -inf; finding them waits for a GPU.
    """

    RAW_LOGPROBS = "raw_logprobs"
    RAW_LOGITS = "raw_logits"
    PROCESSED_LOGPROBS = "processed_logprobs"
    PROCESSED_LOGITS = "processed_logits"

    @property
    def is_raw(self) -> bool:
        return self in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.RAW_LOGITS)

    @property
    def is_normed(self) -> bool:
        return self in (LogprobsMode.RAW_LOGPROBS, LogprobsMode.PROCESSED_LOGPROBS)


@dataclass(frozen=True, slots=True)
class Sampled:
    """N tokens, on the device. One whose largest logit is not finite is not valid.

    token_ids: [N] int64.  highest: [N] fp32, the largest logits.  logprobs: of rows that requested them, or
    None.  parts: of features.
    """

    token_ids: Tensor
    highest: Tensor
    logprobs: SampledLogprobs | None = None
    parts: list[FeaturePart] = field(default_factory=list)


class Sampler:
    """Chooses one token for each row: the largest logit at temperature 0, else a draw."""

    def __init__(
        self,
        ops: Ops,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        features: RunnerFeatures,
        logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self._ops = ops
        self._device = device
        self._features = features
        self._mode = logprobs_mode
        self._parameters = DrawParameters(max_num_seqs, device)
        self._logprob_specs = LogprobSpecs(vocab_size, device)
        # Rows for which more than the largest of the unchanged logits is needed.
        self._reads = np.zeros(max_num_seqs, dtype=bool)
        # The rows of the last step, which of them read, and their rows in the batch.
        self._latest: tuple[Ints, Ints, Ints] | None = None

    def enter(self, row: int, admitted: AdmittedRequest) -> None:
        """Assign `row` to the request, which may have output tokens. Its features know it."""
        sampling = admitted.sampling
        self._parameters.enter(row, sampling)
        self._logprob_specs.enter(row, sampling)
        self._reads[row] = (
            sampling.temperature > 0.0 or sampling.wants_logprobs or self._features.reads_logits(admitted)
        )

    def leave(self, row: int) -> None:
        self._logprob_specs.leave(row)
        self._parameters.leave(row)
        self._latest = None

    def readers(self, rows: Ints) -> Ints:
        """The entries of `rows` whose logits are needed; for the others only the largest is."""
        return self._find_readers(rows)[0]

    def _find_readers(self, rows: Ints) -> tuple[Ints, Ints]:
        if self._latest is None or self._latest[0] is not rows:
            readers = self._reads[rows].nonzero()[0]
            self._latest = (rows, readers, rows[readers])
        return self._latest[1:]

    def choose_most(self, largest: Largest, rows: Ints, positions: Ints, token_ids: Tensor) -> Sampled:
        """Run `choose` where the largest logit of each of N rows is known, and `readers` have their logits.

        The readers' choices are written into `largest`.
        """
        readers, reader_rows = self._find_readers(rows)
        if not len(readers):
            return Sampled(largest.tokens, largest.highest)
        reader_samples = self.choose(largest.kept, reader_rows, positions[readers], token_ids)
        selected = to_device(readers, self._device)
        return Sampled(
            largest.tokens.index_copy_(0, selected, reader_samples.token_ids),
            largest.highest.index_copy_(0, selected, reader_samples.highest),
            None if reader_samples.logprobs is None else reader_samples.logprobs.moved(readers),
            reader_samples.parts,
        )

    def choose(self, logits: Tensor, rows: Ints, positions: Ints, token_ids: Tensor) -> Sampled:
        """One token for each of `rows`, to be written at `positions`, after as many known tokens or drafts.

        logits: [N, V] contiguous, entry n of rows[n]; fp32 ones are written.  token_ids: [max_num_seqs, L]
        int32, of which token_ids[rows[n], :positions[n]] are read.
        """
        logits = logits.float()
        asking = self._logprob_specs.indices(rows)
        scores = None
        if asking and self._mode.is_raw:
            scores = self._scores(self._pick(logits, asking))
        self._features.apply(logits, rows, positions, token_ids)
        # One pass gives the greedy token and detects NaN, which compares larger than every number here.
        highest, tokens = self._ops.greedy(logits)
        if self._parameters.any_draws:
            tokens = self._draw(logits, rows, positions, tokens)
        logprobs = None
        if asking:
            if scores is None:
                scores = self._scores(self._processed(logits, rows, positions, asking))
            logprobs = self._logprob_specs.gather_sampled(scores, self._pick(tokens, asking), asking, rows)
        return Sampled(tokens, highest, logprobs, self._features.after_sampling(logits, tokens, rows))

    def draw(self, logits: Tensor, rows: Ints, positions: Ints) -> Tensor:
        """Tokens [N] as `choose` chooses them from these logits [N, V], without any feature."""
        _, tokens = self._ops.greedy(logits)
        return self._draw(logits, rows, positions, tokens) if self._parameters.any_draws else tokens

    def _draw(self, logits: Tensor, rows: Ints, positions: Ints, greedy_tokens: Tensor) -> Tensor:
        """The tokens [N], replaced by draws for rows that draw."""
        drawn = self._parameters.is_drawn(rows).nonzero()[0]
        if not len(drawn):
            return greedy_tokens
        columns = self._parameters.columns(rows[drawn], positions[drawn])
        is_all = len(drawn) == len(rows)
        selected = to_device(drawn, self._device)
        tokens = self._ops.sample(
            logits if is_all else logits.index_select(0, selected),
            columns.temperature,
            columns.top_k,
            columns.top_p,
            columns.min_p,
            uniform_noise(columns.seeds, columns.positions, draw=0),
        )
        return tokens if is_all else greedy_tokens.index_copy(0, selected, tokens)

    def _pick(self, values: Tensor, indices: list[int]) -> Tensor:
        """The entries of [N, ...] at `indices`, in their order."""
        if len(indices) == len(values):
            return values
        return values.index_select(0, to_device(np.array(indices, dtype=np.int64), self._device))

    def _scores(self, logits: Tensor) -> Tensor:
        """The values to return for each token, [P, V], unaffected by later changes of the logits."""
        return logits.log_softmax(-1) if self._mode.is_normed else logits.clone()

    def _processed(self, logits: Tensor, rows: Ints, positions: Ints, asking: list[int]) -> Tensor:
        """Logits [P, V] of entries with logprobs as used for draws: by temperature, -inf where excluded."""
        indices = np.array(asking, dtype=np.int64)
        picked = self._pick(logits, asking)
        drawn = self._parameters.is_drawn(rows[indices]).nonzero()[0]
        if not len(drawn):
            return picked
        selected = to_device(drawn, self._device)
        columns = self._parameters.columns(rows[indices[drawn]], positions[indices[drawn]])
        part = picked.index_select(0, selected)
        weights = kept_weights(part, columns.temperature, columns.top_k, columns.top_p, columns.min_p)
        # A weight is also 0 if it underflows. Such a token is excluded only if some cut applies, and by top-k
        # only if enough larger ones are left.
        is_full = (columns.top_k > 0) & (weights.count_nonzero(-1) >= columns.top_k)
        has_cut = (columns.min_p > 0.0) | (columns.top_p < 1.0) | is_full
        changed = (part / columns.temperature.clamp(min=MIN_TEMPERATURE)[:, None]).masked_fill_(
            (weights == 0.0) & has_cut[:, None], float("-inf")
        )
        return picked.index_copy(0, selected, changed)
