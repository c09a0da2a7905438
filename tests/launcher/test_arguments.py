"""Whose an argument of `serve` is, and which model an engine gets."""

from __future__ import annotations

from pathlib import Path

from launcher.arguments import EMBEDDED_NAME, parse_serve, with_model
from launcher.services import embedded_model


def test_without_a_model_the_embedded_one_is_served_under_its_name_with_one_thread() -> None:
    assert with_model(["--max-num-seqs", "4"]) == [
        str(embedded_model()),
        f"--served-model-name={EMBEDDED_NAME}",
        "--num-threads=1",
        "--max-num-seqs",
        "4",
    ]


def test_a_model_that_is_named_stays() -> None:
    assert with_model(["--max-num-seqs", "4", "some/model"]) == ["--max-num-seqs", "4", "some/model"]
    assert with_model(["--no-enable-prefix-caching", "some/model"])[-1] == "some/model"


def test_what_the_user_says_of_the_embedded_model_counts() -> None:
    arguments = with_model(["--served-model-name=mine", "--num-threads", "2"])
    assert arguments == [str(embedded_model()), "--served-model-name=mine", "--num-threads", "2"]


def test_flags_and_model_of_serve_reach_their_services(tmp_path: Path) -> None:
    model = str(tmp_path)
    serving = parse_serve([model, "-dp", "2", "--port=0", "--max-num-seqs", "4", "--log-level", "debug"])
    config = serving.config
    assert (config.model, config.data_parallel_size, config.port) == (model, 2, 0)
    assert serving.flags["engine"] == [model, "--max-num-seqs", "4", "--log-level", "debug"]
    assert serving.flags["frontend"] == ["--log-level", "debug"]
    assert serving.flags["coordinator"] == ["--log-level", "debug"]
