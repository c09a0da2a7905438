"""Parameters for drawing: a column of numbers per parameter, one entry per row. Knows no logits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.runner.sampling.transfer import Ints, to_device

_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DrawColumns:
    """Parameters of N rows that draw, on the device. All [N]: fp32, but top_k, seeds and positions int64."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seeds: Tensor
    positions: Tensor


class DrawParameters:
    """The parameters of all rows, kept on the host, where it is decided which rows draw."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        # Rows of floats are temperature, top_p, min_p; rows of ints are top_k and the seed's bits.
        self._floats = np.zeros((3, max_num_seqs), dtype=np.float32)
        self._ints = np.zeros((2, max_num_seqs), dtype=np.int64)
        self._drawing: set[int] = set()

    def enter(self, row: int, sampling: SamplingParams) -> None:
        if sampling.temperature > 0.0:
            self._drawing.add(row)
        self._floats[:, row] = sampling.temperature, sampling.top_p, sampling.min_p
        self._ints[0, row] = sampling.top_k
        self._ints[1, row] = np.uint64(sampling.seed & (2**64 - 1)).astype(np.int64)

    def leave(self, row: int) -> None:
        self._drawing.discard(row)

    @property
    def any_draws(self) -> bool:
        """Whether any row draws; if none does, rows need not be checked."""
        return bool(self._drawing)

    def is_drawn(self, rows: Ints) -> _Bools:
        """[N] whether each row draws; the others take the largest logit."""
        drawn: _Bools = self._floats[0, rows] > 0.0
        return drawn

    def columns(self, rows: Ints, positions: Ints) -> DrawColumns:
        """The parameters of `rows`, whose next tokens get `positions`."""
        floats = to_device(self._floats[:, rows], self._device)
        ints = to_device(np.concatenate([self._ints[:, rows], positions[None]]), self._device)
        return DrawColumns(floats[0], floats[1], floats[2], ints[0], ints[1], ints[2])
