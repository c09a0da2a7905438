"""The amounts of the penalties of a request."""

from __future__ import annotations

from dataclasses import dataclass

from engine_svc.core.extras import Extra


@dataclass(frozen=True, slots=True)
class Penalties(Extra):
    """presence: subtracted once for each token of the output.  frequency: for each occurrence of it there.
    repetition: for tokens of prompt or output; divides logits above 0, multiplies the rest.
    """

    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0


EXTRAS = (Penalties,)
