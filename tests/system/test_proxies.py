"""Streams through nginx and HAProxy with the files of deploy/: none is lost, and heartbeats arrive at once.

`python -m benchmarks proxies` is the same for minutes.
"""

from __future__ import annotations

import argparse

import pytest

from benchmarks.rig.proxies import KINDS
from benchmarks.scenarios.proxies import add_options, measure
from tests.debian import missing_packages

pytestmark = pytest.mark.network


@pytest.mark.parametrize("proxy", KINDS)
async def test_no_stream_is_lost_or_differs_while_a_proxy_is_reloaded(proxy):
    assert missing_packages((proxy,)) == [], f"as root: apt-get install {proxy}"
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(
        [
            "--seconds=5", "--streams=3", "--tokens=40", "--step-ms=50", "--reload-s=1", "--age-s=2",
            "--silence-s=1.5", "--heartbeat-s=0.4",
        ]
    )  # fmt: skip
    options.proxy = [proxy]
    rows, broken = await measure(options, num_frontends=2)
    assert broken == []
    assert {row["protocol"]: row["streams"] > 5 for row in rows} == {"grpc": True, "http": True}
    assert all(row["reloads"] >= 4 for row in rows)
    assert [row["heartbeats"] > 0 for row in rows] == [False, True]
