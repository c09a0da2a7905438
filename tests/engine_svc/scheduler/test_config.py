"""Nonsense is refused with the value and the limit; every option changes something."""

from __future__ import annotations

import pytest

from engine_svc.scheduler.config import SchedulerConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0, must be at least 1"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1, must be at least 1"),
        ({"max_model_len": 0}, "max_model_len is 0, must be at least 1"),
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1, must be at least 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens is -1, must be at least 0"),
        ({"max_steps_in_flight": 0}, "max_steps_in_flight is 0, must be at least 1"),
        ({"max_steps_in_flight": 2}, "max_steps_in_flight is 2, without async_scheduling it must be 1"),
        ({"prefill_share": 0.0}, "prefill_share is 0.0, must be above 0 and below 1"),
        ({"prefill_share": 1.0}, "prefill_share is 1.0, must be above 0 and below 1"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 63},
            "max_num_batched_tokens is 63, without chunked prefill it must be at least max_model_len, 64",
        ),
    ],
)
def test_nonsense_is_refused(options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        SchedulerConfig(**{"max_model_len": 64, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 1},
        {"max_num_batched_tokens": 1},
        {"max_num_seqs": 1},
        {"long_prefill_token_threshold": 0},
        {"num_speculative_tokens": 0},
        {"max_steps_in_flight": 1},
        {"max_steps_in_flight": 2, "async_scheduling": True},
        {"prefill_share": 0.001},
        {"prefill_share": 0.999},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 63},
    ],
)
def test_the_limits_themselves_are_taken(options: dict[str, object]):
    config = SchedulerConfig(**{"max_model_len": 64, **options})
    assert {name: getattr(config, name) for name in options} == options


def test_what_nobody_asked_for():
    assert SchedulerConfig(max_model_len=64) == SchedulerConfig(
        max_model_len=64,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        enable_chunked_prefill=True,
        long_prefill_token_threshold=0,
        reserve_full_prompt=True,
        num_speculative_tokens=0,
        async_scheduling=False,
        max_steps_in_flight=1,
        prefill_share=0.5,
    )
