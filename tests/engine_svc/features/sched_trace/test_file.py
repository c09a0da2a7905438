"""The file of a trace: complete in what it has, and no concern of the loop."""

from __future__ import annotations

import json
import logging
import os
import threading
from functools import partial
from pathlib import Path

import pytest

from engine_svc.config import EngineConfig
from engine_svc.features.sched_trace.file import TraceFile, file_of
from engine_svc.features.sched_trace.records import Record
from triptych_kit.config import ConfigError


def lines_of(*steps: int) -> list[Record]:
    return [{"step": step} for step in steps]


def test_engines_of_one_host_have_files_of_their_own():
    files = [file_of("/here/trace.jsonl", index) for index in range(3)]
    assert files == [Path("/here/trace.jsonl"), Path("/here/trace-1.jsonl"), Path("/here/trace-2.jsonl")]


def test_records_are_lines_that_only_their_owner_can_read(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path)
    for number in range(3):
        file.put(partial(lines_of, number, number), 1)
    file.close()
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [0, 0, 1, 1, 2, 2]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_later_run_is_appended_on_a_line_of_its_own(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    file = TraceFile(path)
    file.put(lambda: [{"step": 2}], 1)
    file.close()
    assert path.read_bytes() == b'{"step": 1}\n{"ste\n{"step":2}\n'


def test_a_file_that_another_engine_writes_is_refused(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    first = TraceFile(path)
    with pytest.raises(ConfigError, match=r"--sched-trace-path: another engine writes to .*trace\.jsonl"):
        TraceFile(path)
    first.close()
    TraceFile(path).close()


def test_a_full_disk_costs_one_warning_and_the_rest_of_the_trace(caplog: pytest.LogCaptureFixture):
    file = TraceFile(Path("/dev/full"))
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            file.put(lambda: [{"text": "x" * 10_000}], 1)
        file.close()
    assert not file.is_open
    file.put(lambda: [{}], 1)
    (warning,) = caplog.records
    assert (warning.levelname, warning.getMessage()) == ("WARNING", "sched_trace stopped")
    assert "No space left on device" in vars(warning)["reason"]


def test_a_disk_that_hangs_costs_one_warning_and_the_rest_of_the_trace(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, max_queued_items=1_000)
    hangs = threading.Event()
    file.put(lambda: [{"hung": hangs.wait(60)}], 10)
    num_put = 1
    with caplog.at_level(logging.INFO):
        while file.is_open:
            file.put(lambda: [{}], 10)
            num_put += 1
        hangs.set()
        file.close()
    (warning,) = caplog.records
    assert vars(warning)["reason"] == "the disk is slower than the engine"
    # The last was refused.
    assert len(path.read_bytes().splitlines()) == num_put - 1 == 101


def test_the_end_does_not_wait_for_a_disk_that_hangs(caplog: pytest.LogCaptureFixture):
    hangs = threading.Event()
    file = TraceFile(Path(os.devnull))

    def wait() -> list[dict]:
        hangs.wait(60)
        return []

    file.put(wait, 1)
    with caplog.at_level(logging.INFO):
        file.close(limit_s=0.01)
    hangs.set()
    (warning,) = caplog.records
    assert "took longer than 0.01 s" in vars(warning)["reason"]


def test_a_file_does_not_grow_beyond_its_limit(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, max_bytes=100)
    with caplog.at_level(logging.INFO):
        for number in range(100):
            file.put(partial(lines_of, number), 1)
        file.close()
    assert 100 < path.stat().st_size < 120
    assert "limit of 100 bytes" in vars(caplog.records[0])["reason"]


def test_what_cannot_be_recorded_does_not_end_the_engine(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    file = TraceFile(tmp_path / "trace.jsonl")
    with caplog.at_level(logging.INFO):
        file.put(lambda: [{"step": object()}], 1)
        file.close()
    assert "not JSON serializable" in vars(caplog.records[0])["reason"]


@pytest.mark.parametrize("path", ["/nowhere/trace.jsonl", "/tmp"])
def test_a_path_that_cannot_be_written_is_refused_before_the_start(path: str):
    with pytest.raises(ConfigError, match=f"--sched-trace-path is {path}, it has to be a file in a folder"):
        EngineConfig("folder", sched_trace_path=path)
