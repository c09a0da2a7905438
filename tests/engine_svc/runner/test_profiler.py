"""A trace appears for what was run between start and stop, with the steps' parts by name."""

from __future__ import annotations

import gzip
import json
import logging
import os
from pathlib import Path

import pytest
import torch

from engine_svc.runner.profiler import MAX_NUM_STEPS, Profiler
from tests.engine_svc.runner.conftest import BLOCK_SIZE, NUM_BLOCKS
from tests.engine_svc.runner.fakes import PlanDriver


def names_in(trace: Path) -> list[str]:
    with gzip.open(trace) as file:
        return [event.get("name", "") for event in json.load(file)["traceEvents"]]


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_a_runners_trace_names_the_parts_of_each_step(tiny_model, tmp_path, model_impl):
    runner = tiny_model("llama", model_impl).runner()
    driver = PlanDriver(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    driver.add("r", [1, 2, 3, 4])
    driver.step({"r": 4})
    target = runner.start_profile(tmp_path / "traces", "unit")
    driver.step({"r": 1})
    driver.step({"r": 1})
    assert runner.stop_profile() == target
    driver.step({"r": 1})
    assert target.parent == tmp_path / "traces"
    assert target.name == f"unit-{os.getpid()}-1.trace.json.gz"
    names = names_in(target)
    assert [names.count(part) for part in ("apply", "forward", "sample")] == [2, 2, 2]


def test_a_range_is_one_object_that_does_nothing_while_nothing_is_recorded(tmp_path):
    profiler = Profiler()
    assert profiler.range("a") is profiler.range("b")
    profiler.start(tmp_path)
    assert profiler.range("a") is not profiler.range("b")
    profiler.stop()
    assert profiler.range("a") is profiler.range("b")


def test_each_recording_has_a_file_and_its_own_events(tmp_path):
    profiler = Profiler()
    files = []
    for name in ("first", "second"):
        profiler.start(tmp_path)
        with profiler.range(name):
            torch.ones(3).sum()
        files.append(profiler.stop())
    assert sorted(tmp_path.iterdir()) == sorted(files)
    assert "first" in names_in(files[0]) and "second" not in names_in(files[0])
    assert "second" in names_in(files[1]) and "first" not in names_in(files[1])


def test_a_recording_holds_so_many_steps_and_says_where_it_ends(tmp_path, caplog):
    profiler = Profiler(max_num_steps=2)
    target = profiler.start(tmp_path)
    with caplog.at_level(logging.WARNING):
        for number in (1, 2, 3, 4):
            profiler.begin_step()
            with profiler.range(f"step {number}"):
                torch.ones(3).sum()
    (record,) = caplog.records
    assert (record.message, vars(record)["num_steps"], vars(record)["file"]) == (
        "profile is full", 2, str(target),
    )  # fmt: skip
    names = names_in(profiler.stop())
    assert [names.count(f"step {number}") for number in (1, 2, 3, 4)] == [1, 1, 0, 0]
    assert names.count("aten::ones") == 2
    profiler.start(tmp_path)
    profiler.begin_step()
    with profiler.range("step 5"):
        torch.ones(3).sum()
    assert "step 5" in names_in(profiler.stop())


def test_a_runner_records_no_more_steps_than_a_recording_holds(tiny_model, tmp_path):
    runner = tiny_model("llama", "native").runner()
    driver = PlanDriver(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    driver.add("r", [1, 2, 3, 4])
    target = runner.start_profile(tmp_path, "unit")
    driver.step({"r": 4})
    for _ in range(MAX_NUM_STEPS + 3):
        driver.step({})
    runner.stop_profile()
    assert names_in(target).count("apply") == MAX_NUM_STEPS


def test_a_second_start_and_a_stop_without_start_are_refused(tmp_path):
    profiler = Profiler()
    with pytest.raises(ValueError, match="the profiler is not recording"):
        profiler.stop()
    profiler.start(tmp_path)
    with pytest.raises(ValueError, match="is recording already, for"):
        profiler.start(tmp_path)
    profiler.stop()


@pytest.mark.parametrize("prefix", ["../x", "a/b", ""])
def test_a_prefix_that_leaves_the_folder_is_refused(tmp_path, prefix):
    with pytest.raises(ValueError, match="prefix is"):
        Profiler().start(tmp_path, prefix)


def test_a_folder_that_cannot_be_made_is_refused_and_nothing_is_recorded(tmp_path):
    (tmp_path / "file").write_text("")
    profiler = Profiler()
    with pytest.raises(OSError, match="file"):
        profiler.start(tmp_path / "file")
    with pytest.raises(ValueError, match="the profiler is not recording"):
        profiler.stop()
