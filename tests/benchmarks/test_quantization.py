"""What int8 costs the embedded model, measured as the benchmark measures it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from benchmarks.quantization import FORMS, Quality, compare, held_out_texts, main, measure
from tools.tiny_model.train import WEIGHTS_FOLDER


@pytest.fixture(scope="module")
def measured() -> list[Quality]:
    texts = held_out_texts(WEIGHTS_FOLDER, 60)
    return [measure(WEIGHTS_FOLDER, dtype, quantization, texts) for dtype, quantization in FORMS]


def test_int8_keeps_the_perplexity_of_the_embedded_model_within_two_percent_of_bf16(measured):
    _, bf16, int8 = measured
    assert abs(int8.perplexity / bf16.perplexity - 1) < 0.02
    # It is quantized at all.
    assert int8.perplexity != bf16.perplexity


def test_the_embedded_model_knows_the_text(measured):
    assert measured[0].num_tokens > 3_000
    assert 1.0 < measured[0].perplexity < 8.0


def test_int8_takes_less_memory_than_bf16_and_bf16_half_of_fp32(measured):
    fp32, bf16, int8 = (each.weight_bytes for each in measured)
    assert bf16 == pytest.approx(fp32 / 2, rel=0.01)
    assert int8 < 0.7 * bf16


def test_rows_are_compared_with_plain_bf16(measured):
    assert [row["percent_over_bf16"] == 0.0 for row in compare(measured)] == [False, True, False]
    worse = [replace(measured[1], quantization="x", perplexity=1.5 * measured[1].perplexity), measured[1]]
    assert [row["percent_over_bf16"] for row in compare(worse)] == [pytest.approx(50.0), 0.0]


def test_the_texts_are_the_same_at_every_call():
    assert held_out_texts(WEIGHTS_FOLDER, 7) == held_out_texts(WEIGHTS_FOLDER, 7)
    assert len(held_out_texts(WEIGHTS_FOLDER, 7)) == 7


def test_a_report_is_written(tmp_path):
    main(["--texts", "2", "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["benchmark"] == "quantization"
    assert [row["quantization"] for row in report["rows"]] == ["none", "none", "int8"]
    assert all(math.isfinite(row["perplexity"]) for row in report["rows"])
