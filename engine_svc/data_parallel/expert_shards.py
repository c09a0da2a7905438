"""Which experts of a model an engine holds, where they are divided over a group of engines. Knows no group.

What was loaded is kept as long as it is needed: of the experts of another place in another group, only those
are read that are not here.
"""

from __future__ import annotations

import logging
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from engine_svc.model.expert_exchange import GroupExchange
from engine_svc.model.loading.loader import LoadedModel, expert_builder
from engine_svc.model.native.build import DecoderBuilder, NoExperts, expert_range
from engine_svc.model.native.decoder import NativeDecoder
from engine_svc.model.native.exchange import ExpertShare
from triptych_kernels import Experts, Ops

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Held:
    """A model whose experts these are, and where more of them come from."""

    # Not held by it: who sleeps gives up the model's memory.
    model: weakref.ref[NativeDecoder]
    folder: Path
    ops: Ops
    device: torch.device
    dtype: str
    digest: str


@dataclass(frozen=True, slots=True)
class _Prepared:
    """By layer with a mixture, what is to take the place of the experts there."""

    rank: int
    size: int
    experts: list[Experts]


class HeldExperts:
    """The ExpertShards of an engine; `attach` gives it the model, at first and whenever it is loaded anew.

    prepare: for a thread of its own.  adopt: with no step in flight.  share: what a model is loaded by now.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.exchange = GroupExchange(rank, size)
        self.num_bytes = 0  # of the experts that are held now
        self._held: _Held | None = None
        self._prepared: _Prepared | None = None
        self._is_released = False  # the model has no experts before something is adopted
        # What is prepared has to be of the model that it is adopted by.
        self._lock = threading.Lock()

    @property
    def share(self) -> ExpertShare:
        """The share that a model is to be loaded with."""
        return ExpertShare(*self.exchange.holds, self.exchange)

    def attach(self, loaded: LoadedModel, folder: Path) -> None:
        """The model has been loaded from the folder, with `share`. What was prepared is prepared again."""
        assert isinstance(loaded.model, NativeDecoder), "others have no experts that could be divided"
        with self._lock:
            self._held = _Held(
                weakref.ref(loaded.model),
                folder,
                loaded.ops,
                loaded.device,
                loaded.facts.dtype,
                loaded.facts.weights_digest,
            )
            self._count(loaded.model)
            self._is_released = False
            stale, self._prepared = self._prepared, None
            if stale is not None:
                self._prepare(stale.rank, stale.size)

    def prepare(self, rank: int, size: int, *, may_release: bool = False) -> None:
        """Load what rank `rank` of `size` is to hold, beside what is held. ValueError or OSError if not.

        may_release: no step is run before something was prepared and adopted. Where memory is short, what is
        held is given up first, and whatever is prepared next is loaded whole.
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is none of {size}")
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
        """Hold what was prepared last; without such, nothing changes."""
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
        """Give up what was prepared and not adopted."""
        with self._lock:
            self._prepared = None

    def _fits(self, rank: int, size: int) -> bool:
        """Prepare that, unless there is too little memory."""
        # Beside what was prepared before, and is superseded, it need not fit.
        self._prepared = None
        try:
            self._prepare(rank, size)
        except (MemoryError, torch.OutOfMemoryError):
            return False
        return True

    def _release(self) -> None:
        """Give up the experts that are held. Only what is adopted brings new ones."""
        model = self._model()
        if model is None:
            return
        for mixture in model.mixtures:
            mixture.mixture.experts = NoExperts()
        self._is_released = True
        self._count(model)
        logger.info("experts given up, as there is too little memory for others beside them")

    def _prepare(self, rank: int, size: int) -> None:
        model = self._model()
        experts: list[Experts] = []
        # Of weights that are given up nothing is kept beside them: they are loaded by what is adopted.
        if model is not None and (self._is_released or (rank, size) != self.exchange.holds):
            assert self._held is not None, "a model is held"
            held = self._held
            builder = expert_builder(
                held.folder, ops=held.ops, device=held.device, dtype=held.dtype, digest=held.digest
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
    """The experts wanted: those that are held copied, the rest read."""
    first, end = wanted
    start = min(max(first, held.expert_range[0]), end)
    stop = max(min(end, held.expert_range[1]), start)
    if start == stop:
        return builder.read_experts(layer, first, end)
    found: Experts = NoExperts()
    for experts in (
        builder.read_experts(layer, first, start),
        held.take(start, stop),
        builder.read_experts(layer, stop, end),
    ):
        if not isinstance(experts, NoExperts):
            found = found.join(experts)
    return found
