"""Blocks of every type stand for the numbers that the gguf package makes of them, bit by bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine_svc.model.loading.gguf.blocks import quantized_weight
from engine_svc.model.loading.gguf.file import TYPES

KINDS = {number: kind for number, kind in TYPES.items() if kind.is_quantized}
NUM_ROWS, NUM_COLUMNS = 37, 768


def assert_same_bits(ours: np.ndarray, theirs: np.ndarray) -> None:
    are_nan = np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), are_nan)
    assert np.array_equal(ours.view(np.int32)[~are_nan], theirs.view(np.int32)[~are_nan])


@pytest.mark.parametrize("number", KINDS, ids=[kind.name for kind in KINDS.values()])
def test_any_bytes_are_the_numbers_of_the_gguf_package(number: int) -> None:
    kind, theirs = KINDS[number], gguf.GGMLQuantizationType(number)
    assert (kind.block_size, kind.block_bytes) == gguf.GGML_QUANT_SIZES[theirs]
    row_bytes = NUM_COLUMNS // kind.block_size * kind.block_bytes
    rows = np.random.default_rng(number).integers(0, 256, (NUM_ROWS, row_bytes), dtype=np.uint8)
    weight = quantized_weight(kind, torch.from_numpy(rows))
    assert weight.shape == (NUM_ROWS, NUM_COLUMNS)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, theirs)
    assert_same_bits(weight.dequantize().numpy(), expected)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_quantized_numbers_are_the_numbers_of_the_gguf_package(name: str) -> None:
    theirs = gguf.GGMLQuantizationType[name]
    numbers = np.random.default_rng(7).normal(size=(NUM_ROWS, NUM_COLUMNS)).astype(np.float32)
    numbers[3] = 0
    rows = gguf.quants.quantize(numbers, theirs)
    weight = quantized_weight(TYPES[theirs.value], torch.from_numpy(rows))
    assert_same_bits(weight.dequantize().numpy(), gguf.quants.dequantize(rows, theirs))


def test_names_of_types_are_those_of_the_gguf_package() -> None:
    for number, kind in TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == kind.name
