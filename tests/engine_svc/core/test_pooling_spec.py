"""What files and options say about results from hidden states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_svc.core.pooling_spec import PoolingFilesError, PoolingOptions, PoolingSpec, read_pooling_spec
from tests.engine_svc.model.encoders import add_sentence_modules

_BERT = {"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 32}
_QWEN = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32}
MEAN = ("Pooling", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})


def read(
    folder: Path, config: dict[str, object], options: PoolingOptions | None = None
) -> PoolingSpec | None:
    (folder / "config.json").write_text(json.dumps(config))
    return read_pooling_spec(folder, options)


def spec_of(folder: Path, config: dict[str, object], options: PoolingOptions | None = None) -> PoolingSpec:
    spec = read(folder, config, options)
    assert spec is not None
    return spec


def test_a_plain_decoder_generates_unless_it_is_converted(tmp_path: Path):
    assert read(tmp_path, _QWEN) is None
    beside = spec_of(tmp_path, _QWEN, PoolingOptions("generate", "embed"))
    assert (beside.tasks, beside.method) == (("generate", "embed", "token_embed"), "last")
    assert spec_of(tmp_path, _QWEN, PoolingOptions("pooling")).tasks == ("embed", "token_embed")


def test_a_decoder_of_sentence_transformers_pools(tmp_path: Path):
    add_sentence_modules(tmp_path, MEAN, ("Normalize", {}))
    spec = spec_of(tmp_path, _QWEN)
    assert (spec.tasks, spec.is_encoder, spec.method) == (("embed", "token_embed"), False, "mean")
    assert read(tmp_path, _QWEN, PoolingOptions("generate")) is None


def test_modules_say_method_projections_length_and_norm(tmp_path: Path):
    add_sentence_modules(tmp_path, MEAN, ("Dense", {"in_features": 32, "out_features": 8}))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 24}')
    spec = spec_of(tmp_path, _BERT)
    assert (spec.method, spec.dense, spec.num_dimensions) == ("mean", ("2_Dense",), 8)
    assert (spec.max_length, spec.normalizes) == (24, False)


def test_the_width_of_a_vector_is_read_by_any_of_its_names_or_its_lack_refused(tmp_path: Path):
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    for name in ("hidden_size", "dim", "n_embd", "d_model"):
        assert spec_of(tmp_path, {**config, name: 32}, PoolingOptions("pooling")).num_dimensions == 32
    with pytest.raises(PoolingFilesError, match="hidden_size or dim or n_embd or d_model is None, must be"):
        read(tmp_path, config, PoolingOptions("pooling"))


def test_options_come_before_the_files(tmp_path: Path):
    add_sentence_modules(tmp_path, MEAN)
    config = '{"pooling_type": "CLS", "normalize": true}'
    spec = spec_of(tmp_path, _BERT, PoolingOptions(pooler_config=config))
    assert (spec.method, spec.normalizes) == ("cls", True)


@pytest.mark.parametrize(
    ("stated", "dimensions"),
    [({}, None), ({"is_matryoshka": True}, ()), ({"matryoshka_dimensions": [8, 16]}, (8, 16))],
)
def test_vectors_are_cut_where_the_config_says_so(tmp_path: Path, stated, dimensions):
    assert spec_of(tmp_path, {**_BERT, **stated}).dimensions == dimensions


def test_heads_of_classes(tmp_path: Path):
    config = {**_BERT, "architectures": ["BertForSequenceClassification"]}
    assert spec_of(tmp_path, config).tasks == ("classify",)
    assert spec_of(tmp_path, {**config, "id2label": {"0": "LABEL_0"}}).tasks == ("classify", "score")
    tokens = {**_BERT, "architectures": ["BertForTokenClassification"]}
    assert spec_of(tmp_path, tokens).tasks == ("token_classify",)


_SCORES = {**_BERT, "architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("stated", "activates"),
    [
        ({}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, True),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, False),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, False),
    ],
)
def test_a_cross_encoder_of_sentence_transformers_says_whether_scores_are_logits(
    tmp_path: Path, stated, activates
):
    assert spec_of(tmp_path, {**_SCORES, **stated}).activates is activates
    opposite = json.dumps({"use_activation": not activates})
    options = PoolingOptions(pooler_config=opposite)
    assert spec_of(tmp_path, {**_SCORES, **stated}, options).activates is not activates


def test_another_activation_of_scores_is_refused(tmp_path: Path):
    config = {**_SCORES, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}
    with pytest.raises(
        PoolingFilesError, match=r"activation of scores is '\S+Tanh', must be one of Sigmoid, Id"
    ):
        spec_of(tmp_path, config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PoolingOptions(convert="classify"), "convert is classify, but BertModel has no such head"),
        (PoolingOptions(pooler_config="[]"), r"pooler_config is '\[\]', must be an object of pooling_type, "),
        (PoolingOptions(pooler_config='{"step_tag_id": 1}'), "pooler_config has 'step_tag_id', it takes"),
        (PoolingOptions(pooler_config='{"pooling_type": "STEP"}'), "pooling_type is 'STEP', must be one of"),
        (PoolingOptions(pooler_config='{"normalize": 1}'), "normalize is 1, must be true or false"),
        (PoolingOptions(hf_overrides='{"rope_theta": 1}'), "hf_overrides has 'rope_theta', it takes archi"),
        (PoolingOptions(hf_overrides='{"classifier_from_token": "a"}'), "is 'a', must be a list of tokens"),
        (PoolingOptions(hf_overrides='{"classifier_from_token": ["a"]}'), "method is None beside "),
        (
            PoolingOptions(hf_overrides='{"classifier_from_token": ["a"], "method": "from_2_way_softmax"}'),
            "classifier_from_token has 1 tokens, from_2_way_softmax takes 2",
        ),
        (
            PoolingOptions(hf_overrides='{"classifier_from_token": ["a"], "method": "no_post_processing"}'),
            "classifier_from_token is of decoders, BertModel is none",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: PoolingOptions, message: str):
    with pytest.raises(PoolingFilesError, match=message):
        spec_of(tmp_path, _BERT, options)


def test_modules_that_are_not_known_are_refused_by_name(tmp_path: Path):
    add_sentence_modules(tmp_path, ("WordWeights", {}))
    with pytest.raises(PoolingFilesError, match="has modules WordWeights; known are Transformer, Pooling"):
        spec_of(tmp_path, _BERT)


def test_a_path_outside_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "modules.json").write_text('[{"type": "a.Dense", "path": "../x"}]')
    with pytest.raises(PoolingFilesError, match=r"path '\.\./x' is outside the folder"):
        spec_of(tmp_path, _BERT)
