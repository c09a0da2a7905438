"""The arguments of `triptych ray place`: whose is which, and what is refused before anything is placed."""

from __future__ import annotations

import pytest

from launcher.ray.config import parse_place
from launcher.services import embedded_model
from service_kit.config import ConfigError

COORDINATOR = "--coordinator=10.0.0.1:50071"


def test_flags_that_are_not_the_placements_own_are_every_engines(tmp_path) -> None:
    placing = parse_place([str(tmp_path), COORDINATOR, "--num-engines=2", "--max-num-seqs", "4"])
    assert placing.engine_flags == (str(tmp_path), "--max-num-seqs", "4", "--num-threads=1")


def test_each_engine_gets_its_rank_its_port_and_the_coordinator() -> None:
    placing = parse_place([COORDINATOR, "--num-engines=2", "--first-rank=2", "--base-port=4000"])
    flags = placing.flags_of(1)
    assert placing.name_of(1) == "engine-3"
    assert flags[-5:] == [
        "--port=4001",
        COORDINATOR,
        "--data-parallel-rank=3",
        "--data-parallel-size=4",
        "--drain-deadline-s=20.0",
    ]


def test_an_engine_that_starts_again_keeps_its_port() -> None:
    placing = parse_place([COORDINATOR])
    assert "--port=0" in placing.flags_of(0)
    assert "--port=4711" in placing.flags_of(0, 4711)


def test_without_a_model_the_embedded_one_is_placed() -> None:
    assert parse_place([COORDINATOR]).engine_flags[0] == str(embedded_model())


def test_engines_have_as_many_threads_as_cpus_are_set_aside_unless_the_user_says_how_many(tmp_path) -> None:
    assert "--num-threads=6" in parse_place([str(tmp_path), COORDINATOR, "--num-cpus=6"]).engine_flags
    chosen = parse_place([str(tmp_path), COORDINATOR, "--num-cpus=6", "--num-threads=2"]).engine_flags
    assert [flag for flag in chosen if "threads" in flag] == ["--num-threads=2"]


def test_engines_that_divide_the_experts_of_a_model_can_be_placed(tmp_path) -> None:
    placing = parse_place([str(tmp_path), COORDINATOR, "--num-engines=2", "--expert-parallel"])
    assert "--expert-parallel" in placing.flags_of(1)
    assert "--data-parallel-size=2" in placing.flags_of(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--coordinator is required"),
        ([COORDINATOR, "--num-engines=0"], "num_engines is 0"),
        ([COORDINATOR, "--num-gpus=-1"], "num_gpus is -1"),
        ([COORDINATOR, "--num-gpus=1.5"], "num_gpus is 1.5"),
        ([COORDINATOR, "--num-gpus=inf"], "num_gpus is inf"),
        ([COORDINATOR, "--first-rank=1024"], "data_parallel_size is 1025"),
        ([COORDINATOR, "--expert-parallel"], "--expert-parallel is True"),
        ([COORDINATOR, "--num-engines=3", "--base-port=65534"], "ports up to 65536"),
        ([COORDINATOR, "--first-rank=1", "--data-parallel-size=1"], "data_parallel_size is 1"),
        ([COORDINATOR, "--env=NAME"], "has to be NAME=VALUE"),
        ([COORDINATOR, "--env=CUDA_VISIBLE_DEVICES=0"], "Ray decides"),
        ([COORDINATOR, "--port=5"], "--port is what the placement tells"),
        ([COORDINATOR, "--data-parallel-rank=1"], "--data-parallel-rank is what the placement tells"),
        ([COORDINATOR, "--max-num-seqs=0"], "--max-num-seqs is 0"),
        ([COORDINATOR, "--max-num-sqs=1"], "did you mean --max-num-seqs"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_before_anything_is_placed(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_place(arguments)


def test_the_environment_is_handed_on() -> None:
    placing = parse_place([COORDINATOR, "--env=HF_HOME=/models", "--env=NAME=a=b"])
    assert placing.config.environment() == {"HF_HOME": "/models", "NAME": "a=b"}
