"""What a config says of its model before any weight is read."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING, PreTrainedConfig

from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.transformers.registry import max_position, model_class, own_config
from tests.engine_svc.model.checkpoints import MAX_POSITION, make_config


def config_of(model_type: str, **options: object) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**options)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3", "mpt", "bart"])
def test_the_longest_sequence_is_found_under_its_names(family):
    assert max_position(make_config(family)) == MAX_POSITION


def test_a_config_that_does_not_say_its_longest_sequence_yields_none():
    assert max_position(make_config("bloom")) == 0


def test_a_model_whose_layers_all_keep_states_computes_no_positions_and_has_a_limit_of_its_own():
    assert max_position(make_config("mamba2")) == 1 << 17


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 160),
        (
            {
                "rope_type": "dynamic",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 96,
            },
            96,
        ),
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 160),
    ],
    ids=["default", "dynamic", "linear"],
)
def test_a_rope_that_depends_on_the_batch_limits_the_length(rope, expected):
    config = make_config("llama")
    config.rope_parameters = rope
    assert max_position(config) == expected


@pytest.mark.parametrize(
    ("model_type", "options", "reason"),
    [
        ("t5", {}, "T5 is an encoder-decoder"),
        ("bart", {}, "Bart is an encoder-decoder"),
        ("whisper", {}, "Whisper is an encoder-decoder"),
        ("jamba", {}, "Jamba has layers of kind linear_attention with states that are not known"),
        ("mllama", {}, "Mllama attends to another model's states"),
        ("vit", {}, r"ViT \(model type vit\) does not generate text"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_cannot_be_served_is_refused_by_name(model_type, options, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        model_class(config_of(model_type, **options))


def test_a_text_model_is_made_from_the_text_part_of_the_config_of_its_whole():
    whole = config_of("qwen3_5")
    assert own_config(whole, model_class_of_text("Qwen3_5ForCausalLM")) is whole.get_text_config()


def test_a_model_of_the_whole_is_made_from_all_of_its_config():
    whole = config_of("gemma3")
    assert own_config(whole, model_class(whole)) is whole


def model_class_of_text(name: str) -> type:
    import transformers

    return getattr(transformers, name)
