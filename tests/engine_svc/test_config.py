"""The options of an engine: what can never work is refused by the name of its flag."""

from __future__ import annotations

import pytest

from engine_svc.config import EngineConfig
from triptych_kit.config import ConfigError, load_config


def test_flags_environment_and_defaults_make_a_configuration():
    loaded = load_config(
        EngineConfig,
        ["folder", "--max-model-len", "16k", "--no-enable-prefix-caching"],
        service="engine",
        env={"TRIPTYCH_ENGINE_MAX_NUM_SEQS": "8"},
    )
    config = loaded.config
    assert (config.model, config.max_model_len, config.max_num_seqs) == ("folder", 16_000, 8)
    assert (config.enable_prefix_caching, config.block_size, config.port) == (False, 16, 50061)


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--num-kv-blocks", "-1"], "--num-kv-blocks"),
        (["--max-model-len", "1"], "--max-model-len"),
        (["--port", "70000"], "--port"),
        (["--drain-deadline-s", "-1"], "--drain-deadline-s"),
        (["--data-parallel-rank", "2", "--data-parallel-size", "2"], "--data-parallel-rank"),
        (["--prefill-share", "1"], "--prefill-share"),
        (["--max-tenant-pinned-share", "1.5"], "--max-tenant-pinned-share"),
        (["--enable-kv-events", "--no-enable-prefix-caching"], "--enable-kv-events is True"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size"),
        (["--pipeline-parallel-size", "0"], "--pipeline-parallel-size"),
        (["--expert-parallel"], "--expert-parallel is True"),
        (["--expert-parallel", "--data-parallel-size", "2", "--tensor-parallel-size", "2"], "--tensor-par"),
        (["--expert-parallel", "--data-parallel-size", "2", "--pipeline-parallel-size", "2"], "--pipeline-p"),
        (["--expert-parallel", "--data-parallel-size", "2", "--lockstep-timeout-s", "0"], "--lockstep-timeo"),
        (["--expert-parallel", "--data-parallel-size", "2", "--step-limit-s", "4"], "--lockstep-timeout-s"),
        (["--data-parallel-group", "x" * 129], "--data-parallel-group"),
        (["--data-parallel-group", "a\nb"], "--data-parallel-group"),
        (["--label", "zone"], "--label is 'zone'"),
        (["--label", "=a"], "--label is '=a'"),
        (["--label", "host=a"], "--label is 'host=a'"),
        (["--label", "zone=a", "--label", "zone=b"], "--label is"),
        (["--label", "zone=" + "a" * 252], "--label is"),
        (
            [text for index in range(33) for text in ("--label", f"key-{index}=a")],
            "--label is given 33 times",
        ),
        (["--max-num-seqs", "65537"], "--max-num-seqs is 65537"),
        (["--steps-in-flight", "65"], "--steps-in-flight is 65"),
        (["--num-speculative-tokens", "65"], "--num-speculative-tokens is 65"),
        (
            ["--speculative", "ngram", "--pipeline-parallel-size", "2"],
            "--speculative is ngram, it has to be off",
        ),
        (
            ["--speculative", "ngram", "--speculative-config", "{}"],
            "--speculative is ngram, it has",
        ),
        (["--speculative-config", "5"], "--speculative-config is 5, it has to be an object"),
        (["--speculative-config", '{"tree": 1}'], 'has "tree", .* takes .* "num_speculative_tokens"$'),
        (
            ["--speculative-config", '{"num_speculative_tokens": 3, "prompt_lookup_max": 4}'],
            'has "prompt_lookup_max", which is not known here: the longest match of 2',
        ),
        (["--speculative-config", '{"disable_by_batch_size": 8}'], ": --draft-limit gain, the default"),
        (
            ["--speculative-config", '{"method": "eagle3"}'],
            "--speculative-model is None, it has to be the",
        ),
        (["--speculative", "mtp", "--speculative-model", "x"], "--speculative-model is x, it has to be left"),
        (["--speculative-model", "x", "--speculative-config", "{}"], "--speculative-model is x, it has"),
        (
            ["--speculative", "draft", "--speculative-model", "x", "--draft-window", "0"],
            "--draft-window is 0",
        ),
        (["--speculative-config", '{"num_speculative_tokens": "x"}'], "--num-speculative-tokens is x"),
        (
            ["--no-enable-chunked-prefill", "--max-num-encoder-input-tokens", "600"],
            "--max-num-encoder-input-tokens is 600, .* without chunked prefill",
        ),
        (
            ["--no-enable-chunked-prefill", "--encoder-cache-tokens", "600"],
            "--encoder-cache-tokens is 600, .* without chunked prefill",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_value_that_cannot_work_is_refused_by_its_flag(arguments, flag):
    with pytest.raises(ConfigError, match=flag):
        load_config(EngineConfig, ["folder", *arguments], service="engine", env={})


def test_speculation_can_be_given_as_vllm_has_it():
    given = '{"method": "ngram", "num_speculative_tokens": 5}'
    assert EngineConfig(model="folder", speculative_config=given).speculation == ("ngram", 5, None)
    given = '{"model": "small", "num_speculative_tokens": 3}'
    assert EngineConfig(model="folder", speculative_config=given).speculation == ("draft", 3, "small")
    given = '{"method": "eagle3", "model": "head"}'
    assert EngineConfig(model="folder", speculative_config=given).speculation == ("eagle", 8, "head")
    assert EngineConfig(model="folder", speculative="ngram").speculation == ("ngram", 8, None)


@pytest.mark.parametrize(
    ("options", "divides"),
    [
        ({"data_parallel_size": 2}, False),
        ({"data_parallel_size": 2, "expert_parallel": True}, True),
        ({"tensor_parallel_size": 2, "expert_parallel": True}, False),
    ],
    ids=["whole experts each", "over engines", "over processes"],
)
def test_experts_are_divided_over_engines_where_that_is_asked_for(options, divides):
    assert EngineConfig(model="folder", **options).divides_experts is divides
    # An engine that steps alone waits for no other, whatever the limit of a step.
    EngineConfig(model="folder", step_limit_s=1.0)


def test_a_model_is_required():
    with pytest.raises(ConfigError, match="MODEL"):
        load_config(EngineConfig, [], service="engine", env={})


def test_labels_are_parsed_by_key_whatever_their_values_hold():
    arguments = ["folder", "--label", "zone=a", "--label", "path=x=y", "--label", "empty="]
    config = load_config(EngineConfig, arguments, service="engine", env={}).config
    assert config.labels == {"zone": "a", "path": "x=y", "empty": ""}
