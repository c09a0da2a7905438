"""The benchmark of a GPU, as far as it goes without one."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from benchmarks.__main__ import main
from benchmarks.scenarios.gpu import decode_floor_ms, measure_prefill, prefill_floor_ms
from benchmarks.scenarios.gpu.model import RandomDecoder, blocks_of, decode_plans, prefill_plan
from benchmarks.scenarios.gpu.steps import idle_shares, time_decode, time_prefill
from triptych_kernels import REFERENCE

CPU = torch.device("cpu")


def tiny_llama(num_layers: int, max_model_len: int) -> LlamaConfig:
    """In place of a shape of 8 billion parameters."""
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=1000,
        max_position_embeddings=max_model_len,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
    )


@pytest.fixture(scope="module")
def decoder() -> RandomDecoder:
    return RandomDecoder(tiny_llama(2, 128), REFERENCE, CPU, torch.float32, max_model_len=128)


def test_bytes_and_operations_are_those_of_the_weights_that_a_step_reads(decoder):
    per_layer = (64 * 32) + (32 * 32) + (3 * 32 * 48)
    head, norms = 1000 * 32, 5 * 32
    assert decoder.bytes_per_step == 4 * (2 * per_layer + head + norms)
    assert decoder.operations_per_token == 2 * (2 * per_layer + head + norms)
    assert decoder.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4


def test_the_floor_of_a_decode_step_is_reading_or_multiplying_and_then_the_kv(decoder):
    slow_memory = decode_floor_ms(decoder, num_rows=2, context=10, bandwidth=1e6, rate=1e15)
    assert slow_memory == pytest.approx(1e-3 * (decoder.bytes_per_step + 20 * decoder.kv_bytes_per_token))
    slow_units = decode_floor_ms(decoder, num_rows=2, context=10, bandwidth=1e15, rate=1e6)
    assert slow_units == pytest.approx(1e-3 * 2 * decoder.operations_per_token)


def test_the_floor_of_a_prompt_multiplies_by_the_head_once(decoder):
    one = prefill_floor_ms(decoder, 1, 1e6)
    two = prefill_floor_ms(decoder, 2, 1e6)
    layers = decoder.operations_per_token - decoder.head_operations
    # The second token's attention reads two places, in 2 layers, 4 heads of 8, for scores and for values.
    assert two - one == pytest.approx(1e-3 * (layers + 4 * 2 * 4 * 8 * 2))


def test_every_planned_step_has_a_token_a_row(decoder):
    runner = decoder.runner(num_rows=3, num_blocks=3 * blocks_of(46), graph_sizes=[])
    for plan in decode_plans(num_rows=3, context=40, num_steps=5):
        result = runner.execute(plan).result()
        assert [len(tokens) for tokens in result.sampled] == [1, 1, 1]
        assert result.non_finite == []


def test_prompts_follow_each_other_in_one_row(decoder):
    runner = decoder.runner(num_rows=1, num_blocks=blocks_of(50), graph_sizes=[])
    for step in range(3):
        assert len(runner.execute(prefill_plan(step, 50)).result().sampled[0]) == 1


def test_prompts_of_several_lengths_are_timed_one_after_the_other(decoder):
    rows = list(measure_prefill(decoder, [20, 50, 35], rate=1e9))
    assert [row["prompt"] for row in rows] == [20, 50, 35]
    assert all(row["prefill_ms"] > 0 for row in rows)


def test_times_are_of_the_steps_that_ran(decoder):
    runner = decoder.runner(num_rows=2, num_blocks=2 * blocks_of(40), graph_sizes=[])
    plans = list(decode_plans(num_rows=2, context=30, num_steps=9))
    times = time_decode(runner, plans, num_lead_in=2, is_traced=False)
    assert times.step_ms > 0
    assert times.gap_percent is None
    fresh = decoder.runner(num_rows=1, num_blocks=blocks_of(30), graph_sizes=[])
    assert time_prefill(fresh, 30, num_repeats=2) > 0


def test_idle_is_what_no_interval_covers():
    work = [(130.0, 180.0), (0.0, 50.0), (20.0, 60.0), (65.0, 100.0), (180.0, 200.0)]
    assert idle_shares(work) == (pytest.approx(100 * 35 / 200), pytest.approx(100 * 30 / 200))
    assert idle_shares([]) == (None, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_measures_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["gpu", "--json", str(tmp_path / "gpu.json")])
    assert ended.value.code == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
