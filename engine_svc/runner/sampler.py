"""From logits to tokens, each row as its request wishes. Noise is a pure function of (seed, position)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.runner.hook import LogitsProcessor
from engine_svc.runner.input_batch import InputBatch
from triptych_kernels import sample, uniform_noise

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


class Sampler:
    """Chooses one token for each row: the largest logit at temperature 0, else a draw."""

    def __init__(self, processors: Sequence[LogitsProcessor] = ()) -> None:
        self._processors = tuple(processors)

    def choose(self, logits: Tensor, batch: InputBatch, rows: _Ints) -> tuple[_Ints, _Bools]:
        """Tokens [N] and whether each is valid; a row without a finite largest logit has none.

        logits: [N, V], entry n of batch row rows[n], whose next token will stand at batch.lengths[rows[n]].
        """
        logits = logits.float()
        self._mask_ends(logits, batch, rows)
        for process in self._processors:
            logits = process(logits, batch, rows.tolist())
        # One pass gives the greedy token and finds NaN, which is larger than every number here.
        highest, greedy = logits.max(dim=-1)
        is_finite: _Bools = highest.isfinite().numpy()
        tokens: _Ints = greedy.numpy()
        is_drawn = is_finite & (batch.temperature[rows] > 0.0)
        if is_drawn.any():
            tokens[is_drawn] = self._draw(logits[torch.from_numpy(is_drawn)], batch, rows[is_drawn])
        return tokens, is_finite

    def _mask_ends(self, logits: Tensor, batch: InputBatch, rows: _Ints) -> None:
        is_too_short = batch.lengths[rows] < batch.min_lengths[rows]
        for index in np.flatnonzero(is_too_short).tolist():
            logits[index, batch.end_token_ids[rows[index]]] = float("-inf")

    def _draw(self, logits: Tensor, batch: InputBatch, rows: _Ints) -> _Ints:
        noise = uniform_noise(
            torch.from_numpy(batch.seeds[rows]), torch.from_numpy(batch.lengths[rows]), draw=0
        )
        drawn: _Ints = sample(
            logits,
            torch.from_numpy(batch.temperature[rows]),
            torch.from_numpy(batch.top_k[rows]),
            torch.from_numpy(batch.top_p[rows]),
            noise,
        ).numpy()
        return drawn
