"""The reference of the ops that keep a state per row, against transformers' own functions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.kernels.state_cases import ALL_SHAPES, MIXED, NUM_MIXED, mixed_step, noise, state_case
from triptych_kernels import REFERENCE, StateBatch

LENGTH, SPLIT = 70, 23


def whole(num_tokens: int, read_slot: int = -1) -> StateBatch:
    """One row that leaves its state in slot 1."""
    return StateBatch.of([num_tokens], [num_tokens], [read_slot], [1])


def assert_close(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_causal_conv_is_that_of_transformers(activation):
    x, weight, bias = noise(LENGTH, 12, seed=1), noise(12, 4, seed=2), noise(12, seed=3)
    states = torch.full((2, 3, 12), float("nan"))
    output = REFERENCE.causal_conv(
        x, weight.t().contiguous(), bias, states, whole(LENGTH), silu=activation == "silu"
    )
    expected = mamba2.causal_conv1d_fn(x.t()[None], weight, bias, activation)
    assert_close(output.t()[None], expected)
    assert torch.equal(states[1], x[-3:])
    # And its single token over a cached state, of which transformers keeps one input more.
    cached = F.pad(states[1].t()[None], (1, 0))
    token = noise(1, 12, seed=4)
    batch = whole(1, read_slot=1)
    output = REFERENCE.causal_conv(
        token, weight.t().contiguous(), bias, states, batch, silu=activation == "silu"
    )
    assert_close(
        output.t()[None], mamba2.causal_conv1d_update(token.t()[None], cached, weight, bias, activation)
    )
    assert torch.equal(states[1], cached[0, :, 1:].t())


def test_ssd_scan_is_that_of_mamba2():
    heads, groups, size, dim = 4, 2, 16, 8
    x, dt = noise(LENGTH, heads, dim, seed=1), noise(LENGTH, heads, seed=2)
    B, C = noise(LENGTH, groups, size, seed=3), noise(LENGTH, groups, size, seed=4)
    A, D, dt_bias = -noise(heads, seed=5).exp(), noise(heads, seed=6), noise(heads, seed=7)
    states, limits = torch.full((2, heads, size, dim), float("nan")), (0.1, 2.0)
    first, then = slice(0, SPLIT), slice(SPLIT, LENGTH)
    outputs, expected = [], []
    state = None
    for part, read_slot in ((first, -1), (then, 1)):
        batch = whole(part.stop - part.start, read_slot)
        outputs.append(
            REFERENCE.ssd_scan(
                x[part], dt[part], B[part], C[part], states, batch, A=A, D=D, dt_bias=dt_bias, dt_limit=limits
            )
        )
        y, state = mamba2.mamba2_chunk_scan(
            x[None, part], dt[None, part], A, B[None, part], C[None, part], 8, D=D, dt_bias=dt_bias,
            dt_softplus=True, dt_limit=limits, return_final_states=True, initial_states=state,
        )  # fmt: skip
        expected.append(y[0])
        assert_close(states[1], state[0].transpose(1, 2))
    assert_close(torch.cat(outputs), torch.cat(expected))
    # Its single token has no limits.
    token = slice(0, 1)
    output = REFERENCE.ssd_scan(
        x[token], dt[token], B[token], C[token], states, whole(1, 1), A=A, D=D, dt_bias=dt_bias
    )
    y = mamba2.mamba2_selective_state_update(
        state, x[token], dt[token][..., None].expand(-1, -1, dim), A[:, None, None].expand(-1, dim, size),
        B[token], C[token], D[:, None].expand(-1, dim), dt_bias[:, None].expand(-1, dim), dt_softplus=True,
    )  # fmt: skip
    assert_close(output, y)
    assert_close(states[1], state[0].transpose(1, 2))


@pytest.mark.parametrize("form", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_gated_delta_rule_is_that_of_qwen3_next(form):
    heads, groups, key_dim, value_dim = 4, 2, 16, 8
    query, key = noise(LENGTH, groups, key_dim, seed=1), noise(LENGTH, groups, key_dim, seed=2)
    value = noise(LENGTH, heads, value_dim, seed=3)
    a, b = noise(LENGTH, heads, seed=4), noise(LENGTH, heads, seed=5)
    A, dt_bias = -noise(heads, seed=6).exp(), noise(heads, seed=7)
    states = torch.full((2, heads, key_dim, value_dim), float("nan"))
    outputs, expected = [], []
    state = None
    for part, read_slot in ((slice(0, SPLIT), -1), (slice(SPLIT, LENGTH), 1)):
        batch = whole(part.stop - part.start, read_slot)
        outputs.append(
            REFERENCE.gated_delta_rule(
                query[part], key[part], value[part], a[part], b[part], states, batch, A=A, dt_bias=dt_bias
            )
        )
        output, state = getattr(qwen3_next, form)(
            query[None, part], key[None, part], value[None, part], g=A * F.softplus(a[None, part] + dt_bias),
            beta=b[None, part].sigmoid(), initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        expected.append(output[0])
        assert_close(states[1], state[0])
    assert_close(torch.cat(outputs), torch.cat(expected))


@pytest.mark.parametrize(("op", "shape"), ALL_SHAPES, ids=str)
def test_rows_of_a_step_are_computed_as_each_alone(op, shape):
    case = state_case(op, shape, NUM_MIXED)
    states, batch = mixed_step(case)
    before = states.clone()
    together = case.run(REFERENCE, states, batch)
    starts = batch.query_starts.tolist()
    for row, (count, _) in enumerate(MIXED):
        if not count:
            continue
        tokens = slice(starts[row], starts[row + 1])
        slots = before.clone()
        alone = StateBatch.of([count], [count], [int(batch.read_slots[row])], [row])
        torch.testing.assert_close(case.part(tokens).run(REFERENCE, slots, alone), together[tokens])
        torch.testing.assert_close(slots[row], states[int(batch.write_slots[tokens][-1])])
    written = batch.write_slots[batch.write_slots >= 0].long()
    others = torch.ones(len(states), dtype=torch.bool).index_fill(0, written, False)
    assert torch.equal(states[others].nan_to_num(), before[others].nan_to_num())
