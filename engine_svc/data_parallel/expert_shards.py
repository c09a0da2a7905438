"""The experts that an engine holds of a model whose experts are divided over engines. Knows no group.

Loaded experts are kept as long as they are needed: when rank or group size change, only missing experts are
read.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass

import torch

from engine_svc.model.expert_exchange import GroupExchange
from engine_svc.model.loading.checkpoint import Checkpoint
from engine_svc.model.loading.loader import LoadedModel, expert_builder
from engine_svc.model.native.build import DecoderBuilder, NoExperts, expert_range
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.native.exchange import ExpertShare
from triptych_kernels import Experts, Ops

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """The model that has the experts, and the source of further ones."""

    # A weak reference: an engine that sleeps releases the model's memory.
    model: weakref.ref[NativeDecoder]
    checkpoint: Checkpoint
    ops: Ops
    device: torch.device
    dtype: str
    digest: str
    activations: str


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The next experts of each layer that has experts."""

    rank: int
    size: int
    experts: list[Experts]


class HeldExperts:
    """The ExpertShards of an engine; `attach` gives it the model each time that it is loaded.

    prepare: for its own thread.  adopt: with no step in flight.  share: the share to load a model with.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.exchange = GroupExchange(rank, size)
        self.num_bytes = 0  # of the present experts
        self._held: _Held | None = None
        self._prepared: _Prepared | None = None
        self._is_released = False  # the model has no experts until some are adopted
        # Prepared experts have to be of the model that adopts them.
        self._lock = threading.Lock()

    @property
    def share(self) -> ExpertShare:
        return ExpertShare(*self.exchange.holds, self.exchange)

    def attach(self, loaded: LoadedModel, checkpoint: Checkpoint) -> None:
        """Set the model, loaded from there with `share`. Prepared experts are prepared again."""
        assert isinstance(loaded.model, NativeDecoder), "other models have no experts that can be divided"
        with self._lock:
            self._held = _Held(
                weakref.ref(loaded.model),
                checkpoint,
                loaded.ops,
                loaded.device,
                loaded.facts.dtype,
                loaded.facts.weights_digest,
                loaded.activations,
            )
            self._count(loaded.model)
            self._is_released = False
            stale, self._prepared = self._prepared, None
            if stale is not None:
                self._prepare(stale.rank, stale.size)

    def prepare(self, rank: int, size: int, *, may_release: bool = False) -> None:
        """Load the experts of rank `rank` of `size` beside the present ones. Raises ValueError or OSError.

        may_release: no step runs before prepared experts are adopted. If memory is short, the present experts
        are released first, and all that is prepared next is loaded in full.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank is {rank}, must be at least 0 and below {size}")
        with self._lock:
            if self._fits(rank, size):
                return
            if may_release and not self._is_released:
                self._release()
                if self._fits(rank, size):
                    return
            raise ValueError(
                f"there is too little memory for the experts of rank {rank} of {size} beside those "
                f"that are in use, which take {self.num_bytes} bytes"
            )

    def adopt(self) -> None:
        """Replace the present experts by those prepared last, if any."""
        with self._lock:
            prepared, self._prepared = self._prepared, None
            if prepared is None:
                return
            model = self._model()
            if model is not None and prepared.experts:
                for mixture, experts in zip(model.mixtures, prepared.experts, strict=True):
                    mixture.mixture.experts = experts
                self._count(model)
            self.exchange.holds = (prepared.rank, prepared.size)
            self._is_released = False
        logger.info(
            "experts held",
            extra={"rank": prepared.rank, "size": prepared.size, "num_bytes": self.num_bytes},
        )

    def forget(self) -> None:
        """Drop what was prepared and not adopted."""
        with self._lock:
            self._prepared = None

    def _fits(self, rank: int, size: int) -> bool:
        """Prepare these experts; False if memory is short."""
        # Experts prepared before are superseded, so that they need no memory beside these.
        self._prepared = None
        try:
            self._prepare(rank, size)
        except (MemoryError, torch.OutOfMemoryError):
            return False
        return True

    def _release(self) -> None:
        """Release the present experts. The model has none until prepared ones are adopted."""
        model = self._model()
        if model is None:
            return
        for mixture in model.mixtures:
            mixture.mixture.experts = NoExperts()
        self._is_released = True
        self._count(model)
        logger.info("experts released: too little memory for the next ones beside them")

    def _prepare(self, rank: int, size: int) -> None:
        model = self._model()
        experts: list[Experts] = []
        # While the model's memory is released (sleep), only rank and size are kept: the experts are loaded
        # with the model.
        if model is not None and (self._is_released or (rank, size) != self.exchange.holds):
            assert self._held is not None, "a model is held"
            held = self._held
            builder = expert_builder(
                held.checkpoint,
                ops=held.ops,
                device=held.device,
                dtype=held.dtype,
                digest=held.digest,
                activations=held.activations,
            )
            for layer, spec in enumerate(builder.spec.experts):
                if spec is not None:
                    mixture = model.mixtures[len(experts)].mixture
                    wanted = expert_range(spec.num_experts, rank, size)
                    experts.append(_regrouped(mixture.experts, wanted, builder, layer))
            logger.info(
                "experts prepared", extra={"rank": rank, "size": size, "num_bytes_read": builder.num_bytes}
            )
        self._prepared = _Prepared(rank, size, experts)

    def _model(self) -> NativeDecoder | None:
        return None if self._held is None else self._held.model()

    def _count(self, model: NativeDecoder) -> None:
        num_bytes = sum(mixture.mixture.experts.num_bytes for mixture in model.mixtures)
        self.num_bytes = num_bytes


def _regrouped(held: Experts, wanted: tuple[int, int], builder: DecoderBuilder, layer: int) -> Experts:
    """The wanted experts: present ones are copied, the others read."""
    first, end = wanted
    start = min(max(first, held.expert_range[0]), end)
    stop = max(min(end, held.expert_range[1]), start)
    if start == stop:
        return builder.read_experts(layer, first, end)
    joined: Experts = NoExperts()
    for experts in (
        builder.read_experts(layer, first, start),
        held.take(start, stop),
        builder.read_experts(layer, stop, end),
    ):
        if not isinstance(experts, NoExperts):
            joined = joined.join(experts)
    return joined
