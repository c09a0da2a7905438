"""Which service a flag of `serve` goes to."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from launcher.flags import split_flags
from service_kit.config import ConfigError, option


@dataclass(frozen=True)
class OwnConfig:
    model: str | None = option(None, help="model", positional=True)
    port: int = option(1, help="port")
    data_parallel_size: int = option(1, short="dp", help="engines")


@dataclass(frozen=True)
class EngineConfig:
    port: int = option(2, help="port")
    max_num_seqs: int = option(8, help="rows")
    log_level: str = option("info", help="level")
    enable_prefix_caching: bool = option(True, help="reuse")
    admin_port: int = option(0, help="port")


@dataclass(frozen=True)
class FrontendConfig:
    port: int = option(3, help="port")
    log_level: str = option("info", help="level")
    max_queued_requests: int = option(4, help="queue")


SERVICES = {"engine": EngineConfig, "frontend": FrontendConfig}


def test_each_flag_goes_to_every_service_that_has_it() -> None:
    argv = ["--max-num-seqs", "4", "--log-level=debug", "--max-queued-requests", "9"]
    own, routed = split_flags(argv, OwnConfig, SERVICES)
    assert own == []
    assert routed == {
        "engine": ["--max-num-seqs", "4", "--log-level=debug"],
        "frontend": ["--log-level=debug", "--max-queued-requests", "9"],
    }


def test_what_serve_has_itself_stays_with_it() -> None:
    own, routed = split_flags(["some/model", "--port", "0", "-dp", "2"], OwnConfig, SERVICES)
    assert own == ["some/model", "--port", "0", "-dp", "2"]
    assert routed == {"engine": [], "frontend": []}


def test_a_switch_does_not_swallow_the_model() -> None:
    own, routed = split_flags(["--no-enable-prefix-caching", "some/model"], OwnConfig, SERVICES)
    assert own == ["some/model"]
    assert routed["engine"] == ["--no-enable-prefix-caching"]


def test_an_unknown_flag_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown flag --max-num-seq; did you mean --max-num-seqs"):
        split_flags(["--max-num-seq", "4"], OwnConfig, SERVICES)


@pytest.mark.parametrize("flag", ["--admin-port", "--engine", "--coordinator", "--index", "--config"])
def test_what_would_contradict_the_launcher_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match="runs alone"):
        split_flags([flag, "1"], OwnConfig, SERVICES)


def test_a_flag_without_its_value_is_named() -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs needs a value"):
        split_flags(["--max-num-seqs"], OwnConfig, SERVICES)
