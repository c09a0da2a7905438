"""Rotary positions, norms of heads and the store of what they turned, in Triton against the reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from triptych_kernels import REFERENCE
from triptych_kernels.triton.rotary import rotary_kv_write

# (tokens, heads, KV heads, head dim, rotary dim)
SHAPES = [(1, 1, 1, 2, 2), (19, 4, 2, 16, 16), (9, 3, 1, 10, 6), (5, 14, 2, 80, 32), (3, 2, 2, 129, 64)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
BLOCK_SIZE = 4


@dataclass
class RotaryCase:
    """Arguments of `rotary_kv_write`."""

    qkv: Tensor
    positions: Tensor
    cos_sin: Tensor
    slots: Tensor
    key_cache: Tensor
    value_cache: Tensor
    num_heads: int
    options: dict[str, object] = field(default_factory=dict)

    def run(self, op) -> tuple[Tensor, Tensor, Tensor]:
        """What `op` writes: qkv, key cache and value cache."""
        qkv, key_cache, value_cache = self.qkv.clone(), self.key_cache.clone(), self.value_cache.clone()
        op(
            qkv,
            self.positions,
            self.cos_sin,
            self.slots,
            key_cache,
            value_cache,
            num_heads=self.num_heads,
            **self.options,
        )
        return qkv, key_cache, value_cache


def rotary_case(
    shape, device, dtype=torch.float32, *, has_norms=False, norm_dtype: torch.dtype | None = None
) -> RotaryCase:
    num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim = shape
    generator = torch.Generator().manual_seed(num_tokens)
    num_blocks = num_tokens // BLOCK_SIZE + 2
    caches = torch.randn(2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim, generator=generator)
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator)[:num_tokens]
    slots[2::5] = -1
    angles = torch.rand(50, rotary_dim // 2, generator=generator) * 6
    options: dict[str, object] = {}
    if has_norms:
        norms = torch.rand(2, head_dim, generator=generator).to(device, norm_dtype or dtype) + 0.5
        options = {"query_norm": norms[0], "key_norm": norms[1], "eps": 1e-5}
    width = (num_heads + 2 * num_kv_heads) * head_dim
    return RotaryCase(
        qkv=torch.randn(num_tokens, width, generator=generator).to(device, dtype),
        positions=torch.randint(50, (num_tokens,), generator=generator).to(device),
        cos_sin=torch.cat([angles.cos(), angles.sin()], dim=1).to(device),
        slots=slots.to(device),
        key_cache=caches[0].to(device, dtype),
        value_cache=caches[1].to(device, dtype),
        num_heads=num_heads,
        options=options,
    )


@pytest.mark.parametrize(
    ("has_norms", "norm_dtype"),
    [(False, None), (True, None), (True, torch.float32)],
    ids=["plain", "normed", "normed-by-fp32"],
)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rotary_kv_write_equals_the_reference(shape, dtype, has_norms, norm_dtype, device):
    case = rotary_case(shape, device, dtype, has_norms=has_norms, norm_dtype=norm_dtype)
    written, expected = case.run(rotary_kv_write), case.run(REFERENCE.rotary_kv_write)
    for output, expected_output in zip(written[:2], expected[:2], strict=True):
        torch.testing.assert_close(output, expected_output, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(written[2], expected[2])


def test_only_queries_change_in_place(device):
    case = rotary_case((9, 4, 2, 16, 16), device, has_norms=True)
    qkv, _, _ = case.run(rotary_kv_write)
    assert torch.equal(qkv[:, 4 * 16 :], case.qkv[:, 4 * 16 :])
    assert not torch.equal(qkv[:, : 4 * 16], case.qkv[:, : 4 * 16])


def test_negative_slots_turn_queries_and_store_nothing(device):
    case = rotary_case((9, 4, 2, 16, 16), device)
    nowhere = replace(case, slots=torch.full_like(case.slots, -1))
    qkv, key_cache, value_cache = nowhere.run(rotary_kv_write)
    assert torch.equal(qkv, case.run(rotary_kv_write)[0])
    assert torch.equal(key_cache, case.key_cache)
    assert torch.equal(value_cache, case.value_cache)


def test_rows_may_lie_apart_and_nothing_between_them_is_touched(device):
    case = rotary_case((9, 4, 2, 16, 8), device, has_norms=True)
    room = torch.full((9, 8 * 16 + 20), float("nan"), device=device)
    room[:, 7 : 7 + 8 * 16] = case.qkv
    rotary_kv_write(
        room[:, 7 : 7 + 8 * 16],
        case.positions,
        case.cos_sin,
        case.slots,
        case.key_cache.clone(),
        case.value_cache.clone(),
        num_heads=4,
        **case.options,
    )
    assert torch.equal(room[:, 7 : 7 + 8 * 16], case.run(rotary_kv_write)[0])
    assert room[:, :7].isnan().all() and room[:, 7 + 8 * 16 :].isnan().all()


def test_an_empty_step_writes_nothing(device):
    case = rotary_case((3, 4, 2, 16, 16), device)
    case.qkv, case.positions, case.slots = case.qkv[:0], case.positions[:0], case.slots[:0]
    _, key_cache, _ = case.run(rotary_kv_write)
    assert torch.equal(key_cache, case.key_cache)


def test_what_does_not_fit_together_is_refused(device):
    case = rotary_case((3, 4, 2, 16, 16), device)
    with pytest.raises(ValueError, match="not rows of 9 x 16"):
        replace(case, num_heads=5).run(rotary_kv_write)
    with pytest.raises(ValueError, match="32 values of 16 cannot be turned"):
        replace(case, cos_sin=torch.zeros(50, 32, device=device)).run(rotary_kv_write)
    with pytest.raises(ValueError, match="qkv is of"):
        replace(case, key_cache=case.key_cache.half()).run(rotary_kv_write)
