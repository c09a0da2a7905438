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
from engine_svc.model.loading.safetensors_file import SafetensorsFile

Head = Callable[[Tensor], Tensor]
_ACTIVATIONS: dict[str, Head] = {
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": nn.functional.gelu,
}


@dataclass(frozen=True, slots=True)
class Pooler:
    """Computes results from hidden states. classify: [R, H] states to logits [R, classes], if it has classes.

    activation: from logits to what is returned.
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

    def scores(self, states: Tensor) -> Tensor:
        """Scores [R, classes] fp32 of states [R, H]."""
        assert self.classify is not None, "a model with classes has a head for them"
        logits = self.classify(states).float()
        return logits if self.activation is None else self.activation(logits)


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
    problem_type: str | None = None,
    num_labels: int = 0,
) -> Pooler:
    """The pooler of a folder's model. Raises CheckpointError or UnsupportedModel for bad projections."""
    dense = tuple(_read_dense(folder / path, dtype, device) for path in spec.dense)
    activation: Head | None = None
    if classify is not None and spec.activates and problem_type != "regression":
        is_single = num_labels == 1 or problem_type == "multi_label_classification"
        activation = torch.sigmoid if is_single else _softmax
    return Pooler(spec, dense, classify, activation)


def pooled(method: str, states: Sequence[Tensor]) -> Tensor:
    """The states [R, H] of prompts, each with all its tokens' states [T, H]."""
    match method:
        case "cls":
            return torch.stack([one[0] for one in states])
        case "last":
            return torch.stack([one[-1] for one in states])
        case "max":
            return torch.stack([one.amax(0) for one in states])
        case "mean":
            return torch.stack([one.mean(0, dtype=torch.float32).to(one.dtype) for one in states])
        case "mean_sqrt_len":
            return torch.stack([one.sum(0) / len(one) ** 0.5 for one in states])
    raise AssertionError(f"a method {method} is not read from any file")


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
