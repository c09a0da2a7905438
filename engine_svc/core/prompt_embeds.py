"""Embeddings that stand in a prompt where it has no tokens. Scheduler and plan carry them, and never look."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.tensors.host_tensor import HostTensor


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """The rows of `embeds` [N, hidden] stand at the N `positions` of the prompt, both in rising order."""

    embeds: HostTensor
    positions: tuple[int, ...]
