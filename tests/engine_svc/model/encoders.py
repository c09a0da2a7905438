"""Tiny encoders with random weights, and what transformers computes with them alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

VOCAB_SIZE = 160
MAX_LENGTH = 64
FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert")
_CLASSES = {
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
    "token_classify": AutoModelForTokenClassification,
}
_DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
_OTHERS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "type_vocab_size": 2,
}


def save_encoder(
    folder: Path, family: str, head: str = "embed", *, num_labels: int = 3, activation: str = "gelu"
) -> PreTrainedModel:
    """Write a checkpoint; returns its model, whose weights are wide enough that tokens matter."""
    is_roberta = family.endswith("roberta")
    options: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": MAX_LENGTH + 2 * is_roberta,
        "pad_token_id": int(is_roberta),
        "num_labels": num_labels,
        "initializer_range": 0.3,
        "activation" if family == "distilbert" else "hidden_act": activation,
        **(_DISTILBERT if family == "distilbert" else _OTHERS),
    }
    config = CONFIG_MAPPING[family](**options)
    torch.manual_seed(len(family) + len(head))
    model: PreTrainedModel = _CLASSES[head].from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def add_sentence_modules(folder: Path, *modules: tuple[str, dict[str, object]]) -> None:
    """Write modules.json: a transformer, then these modules with their configs."""
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for index, (kind, config) in enumerate(modules, start=1):
        path = f"{index}_{kind}"
        listed.append(
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))


@torch.inference_mode()
def states_alone(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[T, hidden] of one prompt."""
    states: Tensor = model.base_model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
    return states


@torch.inference_mode()
def logits_alone(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """[classes], or [T, classes], of one prompt."""
    logits: Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return logits
