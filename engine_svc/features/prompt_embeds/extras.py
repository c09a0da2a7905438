"""The embeddings of a request's prompt, with their positions."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.extras import Extra
from engine_svc.tensors.host_tensor import HostTensor


@dataclass(frozen=True, slots=True)
class PromptEmbeds(Extra):
    """embeds: [N, hidden].  positions: [N] in the prompt, ascending."""

    embeds: HostTensor
    positions: tuple[int, ...]


EXTRAS = (PromptEmbeds,)
