"""Options of the frontend."""

from __future__ import annotations

import pytest

from frontend_svc.config import FrontendConfig
from service_kit.config import ConfigError, load_config


def load(*argv: str) -> FrontendConfig:
    return load_config(FrontendConfig, argv, service="frontend", env={}).config


def test_engines_are_repeatable_and_need_no_coordinator():
    config = load("--engine", "a:1", "--engine=b:2", "--port", "0")
    assert (config.engine, config.coordinator, config.port) == (("a:1", "b:2"), None, 0)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "neither --engine nor --coordinator"),
        (("--engine", "a:1", "--port", "70000"), "port 70000"),
        (("--engine", "a:1", "--max-queued-requests", "0"), "max_queued_requests 0"),
        (("--engine", "a:1", "--slow-reader-s=-1"), "slow_reader_s"),
        (("--engine", "a:1", "--reconnect-window-s=-1"), "reconnect_window_s"),
        (("--engine", "a:1", "--workers", "0"), "workers 0"),
        (("--engine", "a:1", "--workers", "65"), "workers 65"),
        (("--engine", "a:1", "--workers", "3", "--admin-port", "65534"), "admin_port 65534"),
        (("--engine", "a:1", "--share-port", "--port", "0"), "share_port"),
        (("--engine", "a:1", "--max-connection-age-s=-1"), "max_connection_age_s"),
        (("--engine", "a:1", "--max-connection-age-grace-s=3e6"), "max_connection_age_grace_s"),
        (("--engine", "a:1", "--max-n", "0"), "max_n 0"),
        (("--engine", "a:1", "--max-logprobs=-2"), "max_logprobs -2"),
        (("--engine", "a:1", "--stream-interval", "0"), "stream_interval 0"),
        (("--engine", "a:1", "--text-workers=-1"), "text_workers -1"),
        (("--engine", "a:1", "--text-workers=1025"), "text_workers 1025"),
        (("--engine", "a:1", "--text-time-limit-s", "0"), "text_time_limit_s 0"),
        (("--engine", "a:1", "--text-time-limit-s", "601"), "text_time_limit_s 601"),
        (("--engine", "a:1", "--routing-policy", "fastest"), "routing_policy is 'fastest'"),
        (("--coordinator", "a:1", "--engine-label", "host"), "engine_label 'host'"),
        (("--engine", "a:1", "--engine-label", "host=a"), "engine_label chooses"),
        (("--engine", "no port"), "engine"),
        (("--coordinator", "no port"), "coordinator"),
    ],
)
def test_what_cannot_work_is_refused_by_name(argv, words):
    with pytest.raises(ConfigError, match=words):
        load(*argv)
