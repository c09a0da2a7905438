"""Embeddings given in place of prompt tokens. Scheduler and plan pass them on without reading them."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.tensors.host_tensor import HostTensor


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """The rows of `embeds` [N, hidden] are the inputs at the N `positions` of the prompt, in rising order."""

    embeds: HostTensor
    positions: tuple[int, ...]
