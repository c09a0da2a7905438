"""Which encoders' layers run as one op, with transformers' results either way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine_svc.model.transformers.encoder_layers import FusedLayers, fuse_layers
from tests.engine_svc.model.encoders import FAMILIES, save_encoder, states_alone
from triptych_kernels import REFERENCE, ops_for


class Attention:
    """Of one prompt, whose heads are all alike."""

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads

    def attend(self, qkv: Tensor) -> Tensor:
        query, key, value = qkv.view(len(qkv), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return attended.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_layers_with_gelu_run_as_one_op(tmp_path: Path, family: str) -> None:
    model = save_encoder(tmp_path, family)
    expected = states_alone(model, [5, 9, 77, 6])
    attention = Attention(model.config.num_attention_heads)
    assert fuse_layers(model.base_model, ops_for(torch.device("cpu")), attention.attend)
    assert [type(part) for part in model.base_model.children() if isinstance(part, FusedLayers)] == [
        FusedLayers
    ]
    torch.testing.assert_close(states_alone(model, [5, 9, 77, 6]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_other_layers_stay_as_they_are(tmp_path: Path, family: str) -> None:
    attention, native = Attention(4), ops_for(torch.device("cpu"))
    model = save_encoder(tmp_path, family)
    assert not fuse_layers(model.base_model, REFERENCE, attention.attend)
    assert not fuse_layers(model.half().base_model, native, attention.attend)
    relu = save_encoder(tmp_path, family, activation="relu")
    assert not fuse_layers(relu.base_model, native, attention.attend)
    assert not any(isinstance(part, FusedLayers) for part in (*model.modules(), *relu.modules()))
