"""What adapters add to embeddings on the GPU; they are read and laid out on the host."""

from __future__ import annotations

import pytest
import torch

from engine_svc.model.low_rank import EmbeddingAdditions, pack_embedding
from triptych_kernels import ops_for

pytestmark = pytest.mark.gpu


def test_additions_to_embeddings_are_made_on_the_device(device):
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(4, 20, generator=generator), torch.randn(8, 4, generator=generator)
    additions = EmbeddingAdditions()
    additions.put(0, [pack_embedding(ops_for(device), device, down, up, 2.0)])
    token_ids, slots = torch.tensor([5, 6, 7]), torch.tensor([0, -1, 0])
    x = torch.zeros(3, 8).to(device)
    additions.add(x, token_ids.to(device), slots.to(device))
    wanted = 2.0 * (up @ down[:, token_ids]).t() * (slots == 0)[:, None]
    torch.testing.assert_close(x.cpu(), wanted)
