"""The sampler on the GPU chooses what it chooses on the CPU through the references."""

from __future__ import annotations

import pytest
import torch

from tests.engine_svc.runner.sampler_rig import SamplerRig
from triptych_kernels import REFERENCE, ops_for, uniform_noise

pytestmark = pytest.mark.gpu
VOCAB_SIZE = 1000
SAMPLING_OPTIONS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": ((7, 100.0),)},
    {"temperature": 1.0, "allowed_token_ids": frozenset({3, 5, 8})},
    {"temperature": 0.0, "bad_words": ((4,), (1, 2))},
    {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": frozenset(range(500))},
    {"temperature": 0.5, "logprobs": 4, "logprob_token_ids": (1, 9)},
]


def chosen_on(device: torch.device, ops) -> tuple[list[list[int]], list[dict]]:
    """What every row chooses in five steps, and the logprobs of each."""
    num_rows = len(SAMPLING_OPTIONS)
    rig = SamplerRig(ops=ops, max_num_seqs=num_rows, vocab_size=VOCAB_SIZE, device=device)
    for row, options in enumerate(SAMPLING_OPTIONS):
        rig.enter(row, prompt=[1, 2, 3, 4], **{"seed": row, **options})
    generator = torch.Generator().manual_seed(0)
    rows, token_ids = range(num_rows), rig.token_ids
    tokens, logprobs = [], []
    for step in range(5):
        logits = (torch.randn(num_rows, VOCAB_SIZE, generator=generator) * 3).to(device)
        sampled = rig.choose(logits, rows)
        token_ids[:, 4 + step] = sampled.token_ids.int()
        rig.lengths += 1
        tokens.append(sampled.token_ids.tolist())
        assert sampled.logprobs is not None
        logprobs.append(sampled.logprobs.by_index())
    return tokens, logprobs


def test_every_mix_of_sampling_options_chooses_as_on_the_cpu(device):
    here, logprobs_here = chosen_on(device, ops_for(device))
    there, logprobs_there = chosen_on(torch.device("cpu"), REFERENCE)
    assert here == there
    for ours, expected in zip(logprobs_here, logprobs_there, strict=True):
        assert list(ours) == list(expected) == [len(SAMPLING_OPTIONS) - 1]
        for index, logprobs in ours.items():
            assert logprobs.logprobs == pytest.approx(expected[index].logprobs, abs=1e-4)
            assert logprobs.ranks == expected[index].ranks


def test_a_row_with_nan_is_reported_and_affects_no_other(device):
    rig = SamplerRig(ops=ops_for(device), max_num_seqs=3, vocab_size=VOCAB_SIZE, device=device)
    for row, temperature in enumerate((0.0, 1.0, 1.0)):
        rig.enter(row, prompt=[1], temperature=temperature, seed=row)
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)).to(device)
    clean = rig.choose(logits.clone(), range(3)).token_ids.tolist()
    logits[1, 10] = float("nan")
    sampled = rig.choose(logits, range(3))
    assert sampled.highest.isfinite().tolist() == [True, False, True]
    assert [sampled.token_ids.tolist()[row] for row in (0, 2)] == [clean[row] for row in (0, 2)]


def test_noise_is_the_same_on_every_device(device):
    seeds = torch.tensor([0, 1, -1, 2**62], dtype=torch.int64)
    positions = torch.tensor([0, 7, 4096, 2**31], dtype=torch.int64)
    there = uniform_noise(seeds.to(device), positions.to(device), 3)
    assert torch.equal(there.cpu(), uniform_noise(seeds, positions, 3))
