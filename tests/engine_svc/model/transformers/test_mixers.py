"""Mixers with states: as transformers' own over whole sequences, in chunks and one token at a time."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from engine_svc.model.context import ForwardContext
from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.transformers.mixers import replace_mixers
from triptych_kernels import StateBatch, ops_for

HIDDEN, LENGTH = 24, 40
_MAMBA: dict[str, object] = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
_DELTA: dict[str, object] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
# model type: class of the mixer, options of the configuration
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "mamba2": ("Mamba2Mixer", {"num_heads": 6, "head_dim": 8, "n_groups": 2, "state_size": 16, "expand": 2}),
    "bamba": ("BambaMixer", _MAMBA),
    "granitemoehybrid": ("GraniteMoeHybridMambaLayer", _MAMBA | {"layer_types": ["mamba", "attention"]}),
    "nemotron_h": (
        "NemotronHMamba2Mixer",
        {"mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 16},
    ),
    "falcon_h1": ("FalconH1Mixer", _MAMBA | {"mamba_d_ssm": 48, "ssm_in_multiplier": 0.7}),
    "qwen3_next": ("Qwen3NextGatedDeltaNet", _DELTA),
    "qwen3_5_text": ("Qwen3_5GatedDeltaNet", _DELTA),
}


class Holder(nn.Module):
    """A layer with a mixer."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer


def make_mixer(family: str, **options: object) -> nn.Module:
    name, own_options = FAMILIES[family]
    config = AutoConfig.for_model(family, hidden_size=HIDDEN, num_hidden_layers=2, **(own_options | options))
    kind = type(config).__module__.replace("configuration_", "modeling_")
    torch.manual_seed(0)
    mixer = getattr(importlib.import_module(kind), name)(config, 0)
    for parameter in mixer.parameters():
        nn.init.normal_(parameter, std=0.3)
    if family == "falcon_h1":
        mixer.register_buffer("mup_vector", torch.linspace(0.5, 1.5, mixer.in_proj.out_features)[None, None])
    return mixer.eval()


def hidden_states(length: int, seed: int) -> Tensor:
    return torch.randn(1, length, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_replaced_mixer_computes_sequences_as_its_own_in_every_chunk(family):
    holder = Holder(make_mixer(family))
    samples = [hidden_states(LENGTH, seed=1), hidden_states(LENGTH // 2, seed=2)]
    expected = [holder.mixer(sample) for sample in samples]
    context: ForwardContext | None = None
    (shape,) = replace_mixers(holder, ops_for(torch.device("cpu")), lambda: context)
    outputs = [holder.mixer(sample) for sample in samples]
    for output, own in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, own, rtol=1e-4, atol=1e-4)
    # Both sequences together: a chunk of one beside one of the other, then single tokens of the first.
    states = tuple(torch.full((3, *part), float("nan")) for part in shape.parts)
    steps = [
        [(0, 0, 13), (1, 0, 19)],
        [(1, 19, 20), (0, 13, 37)],
        *([(0, end - 1, end)] for end in range(38, 41)),
    ]
    for step in steps:
        batch = StateBatch.of(
            [end - start for _, start, end in step],
            [end for *_, end in step],
            [row + 1 if start else -1 for row, start, _ in step],
            [row + 1 for row, *_ in step],
        )
        context = ForwardContext([], [], [], states=batch, state_layers=[states])
        tokens = torch.cat([samples[row][:, start:end] for row, start, end in step], dim=1)
        output = holder.mixer(tokens, cache_params=None, attention_mask=None)
        wanted = torch.cat([expected[row][:, start:end] for row, start, end in step], dim=1)
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


def test_projections_keep_their_names():
    for family in FAMILIES:
        mixer = make_mixer(family)
        holder = Holder(mixer)
        replace_mixers(holder, ops_for(torch.device("cpu")), lambda: None)
        linear = {name for name, module in mixer.named_modules() if type(module) is nn.Linear}
        assert {name for name, module in holder.mixer.named_modules() if type(module) is nn.Linear} == linear


def test_an_activation_that_no_op_has_is_refused():
    holder = Holder(make_mixer("mamba2", hidden_act="gelu"))
    with pytest.raises(UnsupportedModel, match="'gelu', not by silu"):
        replace_mixers(holder, ops_for(torch.device("cpu")), lambda: None)
