"""A sampler with rows that a test fills, and logits that look like a model's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine_svc.core.sampling_params import SamplingParams
from engine_svc.core.step import AdmittedRequest
from engine_svc.runner.sampler import LogprobsMode, Sampled, Sampler
from triptych_kernels import REFERENCE, Ops

CPU = torch.device("cpu")
VOCAB_SIZE = 50


def random_logits(num_rows: int, *, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


class SamplerRig:
    """Rows by number, with their tokens, over a real sampler."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 16,
        vocab_size: int = VOCAB_SIZE,
        max_length: int = 64,
        ops: Ops = REFERENCE,
        processors: tuple = (),
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    ) -> None:
        self.sampler = Sampler(
            ops, max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=CPU, processors=processors,
            logprobs_mode=mode,
        )  # fmt: skip
        # What stands behind a row's tokens belongs to no row, so it must reach no result.
        self.token_ids = torch.randint(
            vocab_size, (max_num_seqs, max_length), generator=torch.Generator().manual_seed(1)
        ).int()
        self.lengths = np.zeros(max_num_seqs, dtype=np.int64)

    def enter(
        self, row: int, *, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **options: object
    ) -> None:
        """Give `row` to a request, which may have output already; greedy where it does not say."""
        token_ids = [*prompt, *output]
        self.token_ids[row, : len(token_ids)] = torch.tensor(token_ids).int()
        self.lengths[row] = len(token_ids)
        sampling = SamplingParams(**{"max_tokens": 99, "temperature": 0.0, **options})
        self.sampler.enter(row, AdmittedRequest(str(row), token_ids, len(prompt), sampling, [[]]))

    def leave(self, row: int) -> None:
        self.sampler.leave(row)
        self.lengths[row] = 0

    def choose(self, logits: torch.Tensor, rows: Sequence[int]) -> Sampled:
        """What the rows choose; their tokens stay as they are."""
        index = np.array(rows, dtype=np.int64)
        return self.sampler.choose(logits, index, self.lengths[index], self.token_ids)

    def changed(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """The logits as the rows' rules and penalties leave them."""
        written = logits.clone()
        self.choose(written, rows)
        return written

    def append(self, row: int, token: int) -> None:
        self.token_ids[row, self.lengths[row]] = token
        self.lengths[row] += 1

    def generate(self, row: int, steps: Sequence[torch.Tensor]) -> list[int]:
        """The tokens that a row alone chooses and keeps, one for each of the logits [1, V]."""
        tokens = []
        for logits in steps:
            tokens.append(int(self.choose(logits.clone(), [row]).token_ids))
            self.append(row, tokens[-1])
        return tokens
