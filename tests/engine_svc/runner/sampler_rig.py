"""A sampler with rows that a test fills, and logits that look like a model's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine_svc.core.step import AdmittedRequest
from engine_svc.runner.core_features import with_core_features
from engine_svc.runner.feature import RunnerContext, RunnerFeature, RunnerFeatures
from engine_svc.runner.sampler import LogprobsMode, Sampled, Sampler
from tests.engine_svc.request_options import make_runner_features, split_options
from triptych_kernels import REFERENCE, Ops

CPU = torch.device("cpu")
VOCAB_SIZE = 50


def random_logits(num_rows: int, *, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def flat_logits(num_rows: int, value: float = 0.0) -> torch.Tensor:
    return torch.full((num_rows, VOCAB_SIZE), value)


class SamplerRig:
    """Rows by number, with their tokens, over a real sampler."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 16,
        vocab_size: int = VOCAB_SIZE,
        max_length: int = 64,
        ops: Ops = REFERENCE,
        features: Sequence[RunnerFeature] = (),
        mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
        device: torch.device = CPU,
    ) -> None:
        # What stands behind a row's tokens belongs to no row, so it must reach no result.
        self.token_ids = torch.randint(
            vocab_size, (max_num_seqs, max_length), generator=torch.Generator().manual_seed(1)
        )
        self.token_ids = self.token_ids.int().to(device)
        self.lengths = np.zeros(max_num_seqs, dtype=np.int64)
        context = RunnerContext(None, device, torch.float32, vocab_size, max_num_seqs, ops, self.token_ids)
        all_features = with_core_features([*make_runner_features(context), *features], context)
        self.features = RunnerFeatures(all_features, max_num_seqs)
        self.sampler = Sampler(
            ops, max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device, features=self.features,
            logprobs_mode=mode,
        )  # fmt: skip

    def enter(
        self, row: int, *, prompt: Sequence[int] = (1, 2, 3), output: Sequence[int] = (), **options: object
    ) -> None:
        """Give `row` to a request, which may have output already; greedy where it does not say."""
        token_ids = [*prompt, *output]
        self.token_ids[row, : len(token_ids)] = torch.tensor(token_ids).int()
        self.lengths[row] = len(token_ids)
        sampling, extras = split_options(**options)
        admitted = AdmittedRequest(str(row), token_ids, len(prompt), sampling, [[]], extras)
        self.features.add_row(row, admitted)
        self.sampler.enter(row, admitted)

    def leave(self, row: int) -> None:
        self.sampler.leave(row)
        self.features.remove_row(row)
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

    def banned(self, row: int) -> list[int]:
        """The tokens that a row may not choose next."""
        return self.changed(random_logits(1), [row])[0].isneginf().nonzero().flatten().tolist()
