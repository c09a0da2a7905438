"""What is compared of two models' log probabilities, and copies of a checkpoint in formats."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.contestants.logits import compare
from benchmarks.report import Row
from benchmarks.rig.quantized_folder import (
    Rounding,
    awq,
    fp8,
    gptq,
    int4,
    int8,
    write_dequantized,
    write_quantized,
)
from benchmarks.scenarios.quality import OURS, PEER, shortfalls
from tests.engine_svc.model.checkpoints import make_checkpoint

# The largest error of a number, as a part of its group's largest one. A zero of AWQ is rounded, too.
_ERRORS: dict[Callable[..., Rounding], float] = {
    int4: 1 / 14,
    int8: 1 / 254,
    gptq: 1 / 14,
    awq: 2 / 15,
    fp8: 1 / 16,
}
_GROUP = 16


def test_sums_are_those_of_torch(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    theirs, ours = rng.normal(0, 3, (2, 70, 40)).astype(np.float32)
    targets = rng.integers(0, 40, 70).tolist()
    path = str(tmp_path / "stored")
    written = compare(theirs, targets, path, writes=True)
    read = compare(ours, targets, path, writes=False)
    p, q = (torch.from_numpy(logits).double().log_softmax(-1) for logits in (theirs, ours))
    for answer, logprobs in ((written, p), (read, q)):
        loss = torch.nn.functional.nll_loss(logprobs, torch.tensor(targets), reduction="sum")
        assert answer["loss"] == pytest.approx(loss.item(), rel=1e-6)
    divergence = torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")
    assert read["divergence"] == pytest.approx(divergence.item(), rel=1e-5)
    assert read["num_equal"] == (p.argmax(-1) == q.argmax(-1)).sum()


@pytest.mark.parametrize("make", [int4, int8, gptq, awq, fp8])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_numbers_of_a_copy_are_the_nearest_that_the_format_has(
    tmp_path: Path, family: str, make: Callable[..., Rounding]
) -> None:
    make_checkpoint(family, tmp_path / "source")
    full = write_dequantized(tmp_path / "source", tmp_path / "full")
    rounding = make() if make is int8 else make(_GROUP)
    copy = write_quantized(full, tmp_path / "copy", rounding)
    expected = load_file(full / "model.safetensors")
    found = load_file(write_dequantized(copy, tmp_path / "again") / "model.safetensors")
    assert found.keys() == expected.keys()
    differing = {name for name, weight in expected.items() if not torch.equal(weight, found[name])}
    assert {name.split(".")[-2] for name in differing} >= {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert not any(name.endswith(("norm.weight", "gate.weight")) for name in differing)
    for name in differing:
        error, size = (expected[name] - found[name]).abs().max(), expected[name].abs().max()
        # Scales are rounded, too.
        assert error <= size * (_ERRORS[make] + 1 / 256), name


def test_more_than_is_promised_beside_llama_cpp_is_named() -> None:
    def row(program: str, perplexity: float, percent: float) -> Row:
        numbers = {"perplexity": perplexity, "top_1_percent": percent}
        return {"weights": "Q4_K_M", "load": "dtype=bfloat16", "program": program, **numbers}

    theirs = row(PEER, 20.0, 90.0)
    assert shortfalls([row(OURS, 20.09, 89.6), theirs]) == []
    assert shortfalls([row(OURS, 19.8, 89.4), theirs]) == [
        "Q4_K_M with dtype=bfloat16: perplexity is 0.9900 of llama.cpp's",
        "Q4_K_M with dtype=bfloat16: 0.60 points fewer most likely tokens than llama.cpp",
    ]
