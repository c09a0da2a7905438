"""Functions of torch that round by place: the same bits for a row wherever it is, and the values of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine_svc.model.errors import UnsupportedModel
from engine_svc.model.loading.loader import LoadOptions, load_model
from engine_svc.model.transformers import model as transformers_model
from engine_svc.model.transformers.batch_invariance import in_whole_vectors, make_elementwise_invariant
from tests.engine_svc.model.checkpoints import make_checkpoint
from triptych_kernels import REFERENCE, ops_for

OPS = ops_for(torch.device("cpu"))
FUNCTIONS = {
    "elu": F.elu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "sigmoid": torch.sigmoid,
    "sigmoid_of": lambda x: x.sigmoid(),
    "silu": F.silu,
    "softplus": F.softplus,
}

pytestmark = pytest.mark.skipif(
    not OPS.is_batch_invariant, reason="functions stay as they are where rows are not kept apart"
)


class Gate(nn.Module):
    """One of the functions, of the first columns of its input."""

    def __init__(self, name: str, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()), requires_grad=False)
        self.function, self.width = FUNCTIONS[name], width

    def forward(self, x):
        return self.function(x[..., : self.width])


@pytest.mark.parametrize("width", [1, 24, 80, 320], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@torch.inference_mode()
def test_a_row_is_bitwise_the_same_in_every_batch(name, dtype, width):
    model, x = nn.Sequential(Gate(name, width)), 4 * torch.randn(333, 2 * width).to(dtype)
    expected = model(x)
    make_elementwise_invariant(model, OPS, lambda: model(x[:19]))
    together = model(x)
    torch.testing.assert_close(together, expected)
    assert together.shape == expected.shape and together.dtype is expected.dtype
    for start, end in ((0, 1), (5, 6), (5, 13), (7, 44), (1, 333)):
        assert torch.equal(model(x[start:end]), together[start:end])


@torch.inference_mode()
def test_threads_share_a_large_tensor_without_a_seam():
    x = 4 * torch.randn(100_003)
    num_threads = torch.get_num_threads()
    alone = in_whole_vectors(F.silu, x)
    torch.set_num_threads(2)
    try:
        assert torch.equal(in_whole_vectors(F.silu, x), alone)
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(in_whole_vectors(F.silu, x[777:888]), alone[777:888])


@torch.inference_mode()
def test_what_needs_no_care_is_left_alone():
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, x):
            return F.silu(x)

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        whole = nn.Sequential(Whole())
        assert make_elementwise_invariant(whole, OPS, lambda: whole(torch.randn(19, 128))) == 0
        assert make_elementwise_invariant(whole, OPS, lambda: whole(torch.randn(19, 96))) == 1
        assert make_elementwise_invariant(whole, REFERENCE, lambda: whole(torch.randn(19, 96))) == 0
    finally:
        torch.set_num_threads(num_threads)


@torch.inference_mode()
def test_a_function_in_place_stays_in_place():
    class InPlace(Gate):
        def forward(self, x):
            F.silu(x, inplace=True)
            return x

    model = nn.Sequential(InPlace("silu", 24))
    x = torch.randn(3, 24)
    expected = F.silu(x)
    make_elementwise_invariant(model, OPS, lambda: model(x.clone()))
    torch.testing.assert_close(model(x.clone()), expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        # Rows that are no whole number of vectors, be those of AVX2 or of AVX-512.
        ("deepseek_v3", {"moe_intermediate_size": 12, "num_hidden_layers": 4}),
        ("gemma4", {"hidden_size_per_layer_input": 8}),
    ],
    ids=["deepseek_v3", "gemma4"],
)
def test_models_with_narrow_gates_are_deterministic_by_it(family, changes, tmp_path, monkeypatch):
    make_checkpoint(family, tmp_path, **changes)
    options = LoadOptions(num_threads=1, is_deterministic=True)
    assert load_model(tmp_path, options).implementation == "transformers"
    monkeypatch.setattr(transformers_model, "make_elementwise_invariant", lambda *_: 0)
    with pytest.raises(UnsupportedModel, match=r"deterministic is on.*ForCausalLM"):
        load_model(tmp_path, options)


def test_a_model_whose_products_depend_on_the_batch_is_refused_or_warned_of(tmp_path, caplog):
    make_checkpoint("longcat_flash", tmp_path)
    for is_deterministic in (None, False):
        caplog.clear()
        load_model(tmp_path, LoadOptions(num_threads=1, is_deterministic=is_deterministic))
        assert ("may differ by rounding" in caplog.text) is (is_deterministic is None)
    with pytest.raises(UnsupportedModel, match=r"deterministic is on.*LongcatFlashForCausalLM: choose auto"):
        load_model(tmp_path, LoadOptions(num_threads=1, is_deterministic=True))
