"""Decoders with classes: from a head of the checkpoint, or from the logits of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from engine_svc.core.pooling_spec import PoolingOptions
from engine_svc.model.errors import CheckpointError
from tests.engine_svc.features.pooling.rig import PoolingRig
from tests.engine_svc.features.pooling.test_decoders import prompts_of, states_alone
from tests.engine_svc.model.checkpoints import make_checkpoint

IDS = {"no": 7, "yes": 9, "perhaps": 11}
QWEN3_RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["no", "yes"],
    "is_original_qwen3_reranker": True,
}


def overridden(**values: object) -> PoolingOptions:
    return PoolingOptions(hf_overrides=json.dumps(values))


def make_reranker(family: str, folder: Path) -> PreTrainedModel:
    model = make_checkpoint(family, folder)
    vocabulary = {"model": {"vocab": IDS}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    return model


@torch.inference_mode()
def last_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([token_ids])).logits[0, -1]
    return logits


def make_classifier(family: str, folder: Path, chosen: Any, num_labels: int) -> PreTrainedModel:
    make_checkpoint(family, folder / "decoder")
    config = AutoConfig.from_pretrained(folder / "decoder", num_labels=num_labels)
    torch.manual_seed(3)
    model: PreTrainedModel = chosen.from_pretrained(folder / "decoder", config=config).eval()
    torch.nn.init.normal_(model.get_submodule("score").weight)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_score_is_the_probability_of_the_second_token(tmp_path: Path, family: str, model_impl: str) -> None:
    model = make_reranker(family, tmp_path)
    rig = PoolingRig(
        tmp_path, pooling=overridden(**QWEN3_RERANKER), model_impl=model_impl, max_num_batched_tokens=16
    )
    assert rig.facts.tasks == ("classify", "score")
    prompts = prompts_of()
    results = rig.results(prompts, "score")
    assert results.keys() == prompts.keys()
    for name, score in results.items():
        logits = last_logits(model, prompts[name])[[IDS["no"], IDS["yes"]]]
        torch.testing.assert_close(score, logits.softmax(-1)[1:], atol=1e-5, rtol=0)


def test_classes_may_be_the_logits_of_tokens_as_they_are(tmp_path: Path) -> None:
    model = make_reranker("qwen2", tmp_path)
    options = overridden(classifier_from_token=list(IDS), method="no_post_processing")
    rig, prompts = PoolingRig(tmp_path, pooling=options), prompts_of()
    assert rig.facts.tasks == ("classify",)
    for name, scores in rig.results(prompts, "classify").items():
        expected = last_logits(model, prompts[name])[list(IDS.values())].softmax(-1)
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


def test_a_decoder_may_score_beside_its_tokens(tmp_path: Path) -> None:
    model = make_reranker("qwen3", tmp_path)
    options = PoolingOptions("generate", "classify", hf_overrides=json.dumps(QWEN3_RERANKER))
    alone = PoolingRig(tmp_path)
    alone.add("sampled", [9, 8, 7, 6], None)
    alone.run()
    rig = PoolingRig(tmp_path, pooling=options)
    assert rig.facts.tasks == ("generate", "classify", "score")
    rig.add("sampled", [9, 8, 7, 6], None)
    (score,) = rig.results({"p": [5, 6, 7]}, "score").values()
    expected = last_logits(model, [5, 6, 7])[[IDS["no"], IDS["yes"]]].softmax(-1)[1:]
    torch.testing.assert_close(score, expected, atol=1e-5, rtol=0)
    assert rig.outputs["sampled"] == alone.outputs["sampled"]


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3"])
def test_a_head_for_classes_takes_the_last_token(tmp_path: Path, family: str, model_impl: str) -> None:
    model = make_classifier(family, tmp_path, AutoModelForSequenceClassification, 3)
    rig, prompts = PoolingRig(tmp_path, model_impl=model_impl), prompts_of()
    assert rig.facts.tasks == ("classify",)
    for name, scores in rig.results(prompts, "classify").items():
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompts[name]])).logits[0]
        torch.testing.assert_close(scores, logits.softmax(-1), atol=1e-5, rtol=0)


def test_a_head_for_classes_of_tokens_takes_all_of_them_in_chunks(tmp_path: Path) -> None:
    model = make_classifier("qwen3", tmp_path, AutoModelForTokenClassification, 3)
    torch.nn.init.normal_(model.get_submodule("score").bias)
    model.save_pretrained(tmp_path)
    rig, prompts = PoolingRig(tmp_path, max_num_batched_tokens=16), prompts_of()
    for name, scores in rig.results(prompts, "token_classify").items():
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompts[name]])).logits[0]
        torch.testing.assert_close(scores, logits.softmax(-1), atol=1e-5, rtol=0)


def test_a_head_for_other_classes_than_the_config_has_is_refused(tmp_path: Path) -> None:
    model = make_classifier("qwen3", tmp_path, AutoModelForSequenceClassification, 3)
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = model.config.hidden_size
    words = rf"score.weight has shape \(3, {size}\), must be \(2, {size}\): num_classes, hidden_size"
    with pytest.raises(CheckpointError, match=words):
        PoolingRig(tmp_path)


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_a_decoder_may_be_saved_without_its_head(tmp_path: Path, model_impl: str) -> None:
    model = make_checkpoint("qwen3", tmp_path / "whole")
    body: Any = model.base_model
    body.save_pretrained(tmp_path)
    rig, prompts = PoolingRig(tmp_path, model_impl=model_impl), prompts_of()
    assert rig.facts.tasks == ("embed", "token_embed")
    for name, vector in rig.results(prompts, "embed").items():
        torch.testing.assert_close(vector, states_alone(model, prompts[name])[-1], atol=1e-5, rtol=0)


def test_a_token_that_the_vocabulary_lacks_is_refused_by_name(tmp_path: Path) -> None:
    make_reranker("qwen3", tmp_path)
    options = overridden(classifier_from_token=["no", "never"], method="from_2_way_softmax")
    with pytest.raises(CheckpointError, match="classifier_from_token has 'never', which is no token of"):
        PoolingRig(tmp_path, pooling=options)
