"""The head of a model that pools: from states of tokens to vectors, and to scores of classes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from engine_svc.core.pooling_spec import PoolingSpec
from engine_svc.model.errors import CheckpointError, UnsupportedModel
from engine_svc.model.loading.folder import read_json_object
from engine_svc.model.loading.safetensors_file import SafetensorsFile
from engine_svc.model.loading.weights import WeightReader
from triptych_kernels import as_tensor

Head = Callable[[Tensor], Tensor]
_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_ACTIVATIONS: dict[str, Head] = {
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": nn.functional.gelu,
}


@dataclass(frozen=True, slots=True)
class Pooler:
    """Computes results from hidden states. classify: [R, H] states to logits [R, classes], if it has classes.

    activation: from logits to probabilities; None without classes and in a regression.
    """

    spec: PoolingSpec
    dense: tuple[Head, ...] = ()
    classify: Head | None = None
    activation: Head | None = None

    def embed(self, states: Tensor, *, normalize: bool, num_dimensions: int | None = None) -> Tensor:
        """Vectors [R, D] fp32 of states [R, H], cut to `num_dimensions` before they are normalized."""
        for project in self.dense:
            states = project(states)
        vectors = states.float()[:, :num_dimensions]
        return nn.functional.normalize(vectors, dim=-1) if normalize else vectors

    def scores(self, states: Tensor, *, activate: bool) -> Tensor:
        """Scores [R, classes] fp32 of states [R, H], logits unless `activate`."""
        assert self.classify is not None, "a model with classes has a head for them"
        logits = self.classify(states).float()
        return self.activation(logits) if activate and self.activation is not None else logits


@runtime_checkable
class PoolingModel(Protocol):
    """A model with a pooler."""

    @property
    def pooler(self) -> Pooler | None: ...


def make_pooler(
    spec: PoolingSpec,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    classify: Head | None = None,
) -> Pooler:
    """The pooler of a folder's model. Raises CheckpointError or UnsupportedModel for bad projections."""
    dense = tuple(_read_dense(folder / path, dtype, device) for path in spec.dense)
    activation: Head | None = None
    if classify is not None and spec.problem_type != "regression":
        is_single = spec.num_classes == 1 or spec.problem_type == "multi_label_classification"
        activation = torch.sigmoid if is_single else _softmax
    return Pooler(spec, dense, classify, activation)


def read_score_head(reader: WeightReader, num_classes: int, hidden_size: int) -> Head:
    """The head for classes of a decoder's checkpoint, computed in fp32. Raises CheckpointError."""
    weight = reader.read("score.weight").float()
    if weight.shape != (num_classes, hidden_size):
        raise CheckpointError(
            f"score.weight has shape {tuple(weight.shape)}, must be {(num_classes, hidden_size)}: "
            "num_classes, hidden_size"
        )
    bias = reader.read("score.bias").float() if "score.bias" in reader.names else None
    return lambda states: nn.functional.linear(states.float(), weight, bias)


def read_token_head(spec: PoolingSpec, reader: WeightReader, folder: Path) -> Head:
    """Classes from the logits of `spec.class_tokens`, computed in fp32. Raises CheckpointError."""
    ids = _token_ids(folder, spec.class_tokens)
    name = _LM_HEAD if _LM_HEAD in reader.names else _EMBEDDING
    weight = torch.cat(
        [as_tensor(reader.read_slice(name, 0, token_id, token_id + 1)) for token_id in ids]
    ).float()
    if spec.compares_tokens:
        weight = weight[1:] - weight[:1]
    return lambda states: nn.functional.linear(states.float(), weight)


def pooled(method: str, states: Sequence[Tensor]) -> Tensor:
    """The states [R, H] of prompts, each with all its tokens' states [T, H]."""
    match method:
        case "cls":
            return torch.stack([one[0] for one in states])
        case "last":
            return torch.stack([one[-1] for one in states])
        case "max":
            return _reduced(states, lambda equal: equal.amax(1))
        case "mean":
            return _reduced(states, lambda equal: equal.mean(1, dtype=torch.float32).to(equal.dtype))
        case "mean_sqrt_len":
            return _reduced(states, lambda equal: equal.sum(1) / equal.shape[1] ** 0.5)
    raise AssertionError(f"a method {method} is not read from any file")


def _reduced(states: Sequence[Tensor], reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """[R, H] by `reduce`, from [N, T, H] to [N, H], called once for all prompts of one length."""
    rows: dict[int, list[int]] = {}
    for row, one in enumerate(states):
        rows.setdefault(len(one), []).append(row)
    parts = [reduce(torch.stack([states[row] for row in equal])) for equal in rows.values()]
    if len(parts) == 1:
        return parts[0]
    of_row = {
        row: vector
        for equal, part in zip(rows.values(), parts, strict=True)
        for row, vector in zip(equal, part.unbind(0), strict=True)
    }
    return torch.stack([of_row[row] for row in range(len(states))])


def _token_ids(folder: Path, tokens: Sequence[str]) -> list[int]:
    """Of tokens as spelled in the vocabulary of tokenizer.json."""
    content = read_json_object(folder / "tokenizer.json")
    ids: dict[str, int] = {}
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            ids |= vocabulary
        else:
            ids |= {token: index for index, (token, _) in enumerate(vocabulary)}
        ids |= {added["content"]: added["id"] for added in content.get("added_tokens") or ()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder}/tokenizer.json cannot be read: its tokens have no ids") from error
    for token in tokens:
        if type(ids.get(token)) is not int:
            raise CheckpointError(
                f"classifier_from_token has {token!r}, which is no token of {folder}/tokenizer.json"
            )
    return [ids[token] for token in tokens]


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1)


def _read_dense(folder: Path, dtype: torch.dtype, device: torch.device) -> Head:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    name = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{folder}: activation_function is {name!r}, must be one of {', '.join(_ACTIVATIONS)}"
        )
    path = folder / "model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no model.safetensors")
    file = SafetensorsFile(path)
    tensors = {key: file.read(stored).to(device, dtype) for key, stored in file.tensors.items()}
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None:
        raise CheckpointError(f"{path} lacks linear.weight")
    activate = _ACTIVATIONS[name]

    def project(states: Tensor) -> Tensor:
        return activate(nn.functional.linear(states, weight, bias))

    return project
