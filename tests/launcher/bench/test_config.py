"""What the options of a load accept."""

from __future__ import annotations

import dataclasses
import math

import pytest

from launcher.bench.config import BenchServeConfig
from service_kit.config import ConfigError, load_config


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--num-requests=0", "num_requests is 0"),
        ("--connections=0", "connections is 0"),
        ("--rate=0", "rate is 0"),
        ("--rate=nan", "'nan' is not a number"),
        ("--burstiness=0", "burstiness is 0"),
        ("--range-ratio=1", "range_ratio is 1"),
        ("--timeout-s=inf", "timeout_s is inf"),
        ("--warmup=-1", "warmup"),
        ("--plot=a.pdf", ".png"),
        ("--slo=latency=3", "ttft_ms"),
        ("--dataset=sharegpt", "multi-turn"),
        ("--requests=3", "--num-requests"),
    ],
)
def test_what_cannot_work_is_refused_by_name(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(BenchServeConfig, [flag], service="bench", env={})


def test_infinity_is_a_rate_and_bounds_add_up() -> None:
    arguments = ["--rate", "inf", "--slo", "ttft_ms=200", "--slo", "e2e_ms=900,tpot_ms=50"]
    config = load_config(BenchServeConfig, arguments, service="bench", env={}).config
    assert math.isinf(config.rate)
    level = config.service_level()
    assert level is not None
    assert (level.ttft_ms, level.tpot_ms, level.e2e_ms) == (200, 50, 900)


def test_every_option_has_a_help_text() -> None:
    fields = dataclasses.fields(BenchServeConfig)
    assert [field.name for field in fields if len(field.metadata.get("help", "").split()) < 2] == []
