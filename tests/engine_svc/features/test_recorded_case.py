"""The file of a case: complete in what it says, and careful with what is there."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine_svc.cache.attention import ChunkedLocal, FullAttention, SlidingWindow
from engine_svc.cache.config import CacheConfig
from engine_svc.config import EngineConfig
from engine_svc.core.request import Request
from engine_svc.core.sampling_params import SamplingParams
from engine_svc.features.recorded_case import case_config, create_case
from engine_svc.scheduler.config import SchedulerConfig
from service_kit.config import ConfigError
from tests.conformance.replay import read_case
from tests.engine_svc.features.recording import CACHE, SCHEDULER, Recording


def test_a_recording_is_one_json_object_with_what_is_known_last_at_its_end(tmp_path: Path):
    recording = Recording(tmp_path)
    assert list(recording.end()) == [
        "format", "case", "family", "set", "reference_version", "seed", "config", "steps",
        "coverage", "ended",
    ]  # fmt: skip
    text = gzip.decompress(recording.path.read_bytes()).decode()
    assert json.loads(text)["reference_version"] == "triptych 9"
    assert json.loads(text)["steps"] == []


def test_a_case_names_everything_by_which_the_scheduler_decides(tmp_path: Path):
    scheduler = SchedulerConfig(
        max_model_len=70,
        max_num_batched_tokens=80,
        max_num_seqs=6,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=9,
        reserve_full_prompt=False,
        num_speculative_tokens=3,
        async_scheduling=True,
        max_steps_in_flight=2,
    )
    cache = CacheConfig(40, (SlidingWindow(8, 20), FullAttention(4)), True, 2, True)
    recording = Recording(tmp_path, scheduler, cache, "priority")
    sampling = SamplingParams(
        max_tokens=9, min_tokens=3, eos_token_id=5, ignore_eos=True, stop_token_ids=frozenset({8, 7}),
        skip_reading_prefix_cache=True,
    )  # fmt: skip
    added = Request("r0", [1, 2], 2, sampling, priority=-4, arrival_at=0.1 + 0.2, cache_salt="salt")
    recording.scheduler.add(added)
    recording.step()
    case = recording.end()
    assert case["config"] == {
        "block_size": 4,
        "num_gpu_blocks": 40,
        "max_num_batched_tokens": 80,
        "max_num_seqs": 6,
        "max_model_len": 70,
        "policy": "priority",
        "long_prefill_token_threshold": 9,
        "enable_chunked_prefill": False,
        "enable_prefix_caching": True,
        "reserve_full_prompt": False,
        "num_speculative_tokens": 3,
        "num_lookahead_tokens": 2,
        "drop_last_matched_block": True,
        "async_scheduling": True,
        "max_steps_in_flight": 2,
        "kv_groups": [
            {"kind": "sliding", "block_size": 8, "sliding_window": 20},
            {"kind": "full", "block_size": 4, "sliding_window": None},
        ],
    }
    assert case["steps"][0]["events"][0]["request"] == {
        "id": "r0",
        "prompt": [1, 2],
        "max_tokens": 9,
        "min_tokens": 3,
        "ignore_eos": True,
        "eos_token_id": 5,
        "stop_token_ids": [7, 8],
        "priority": -4,
        "arrival_time": 0.1 + 0.2,
        "cache_salt": "salt",
        "skip_prefix_lookup": True,
    }


def test_an_earlier_recording_is_kept(tmp_path: Path):
    for _ in range(3):
        Recording(tmp_path).end()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["case-2.json.gz", "case-3.json.gz", "case.json.gz"]
    assert [read_case(tmp_path / name)["case"] for name in names] == ["case-2", "case-3", "case"]


def test_a_place_that_cannot_be_written_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match=r"nowhere/x\.json\.gz: No such file"):
        create_case(tmp_path / "nowhere" / "x.json.gz", {}, version="9")


@pytest.mark.parametrize(
    ("cache", "policy", "has_budgets", "words"),
    [
        (CACHE, "least-recompute", False, "least-recompute"),
        (CACHE, "fcfs", True, "spends more"),
        (replace(CACHE, groups=(ChunkedLocal(4, 8),)), "fcfs", False, "ChunkedLocal"),
    ],
    ids=["policy", "budgets", "attention"],
)
def test_a_setup_that_the_format_cannot_say_is_refused(cache, policy, has_budgets, words):
    with pytest.raises(ValueError, match=words):
        case_config(SCHEDULER, cache, policy, has_budgets=has_budgets)


def test_the_file_has_to_have_the_name_of_a_case():
    assert EngineConfig("folder", record_decisions="here/x.json.gz").record_decisions == "here/x.json.gz"
    with pytest.raises(ConfigError, match="--record-decisions"):
        EngineConfig("folder", record_decisions="x.json")
