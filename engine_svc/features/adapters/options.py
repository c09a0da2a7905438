"""Flags of adapters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine_svc.core.control import Collective
from engine_svc.features.options import FeatureOptions
from triptych_kit.config import option, require

if TYPE_CHECKING:
    from engine_svc.config import EngineConfig

# A slot is an index of a table in each projection.
_MAX_SLOTS = 1024
_MAX_RANK = 512
# How many adapters a rank has in memory.
COLLECTIVE = Collective("adapters")


@dataclass(frozen=True, kw_only=True)
class Options(FeatureOptions):
    enable_lora: bool = option(False, help="serve LoRA adapters of the model beside it")
    max_loras: int = option(8, help="most different adapters in a step")
    max_lora_rank: int = option(64, help="highest rank of an adapter")
    max_cpu_loras: int | None = option(
        None, help="most adapters in host memory (default: four times --max-loras)"
    )
    lora_modules: tuple[str, ...] = option(
        (), help="NAME=PATH of an adapter's folder, as PEFT saves it; may be repeated"
    )
    lora_dir: str | None = option(None, help="folder of adapters: each folder in it is one, under its name")
    allow_runtime_lora: bool = option(
        False, help="let frontends load and unload adapters in folders below --lora-dir"
    )

    @property
    def num_cpu_loras(self) -> int:
        """Most adapters in host memory."""
        return 4 * self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras

    def check(self) -> None:
        """Raise ConfigError for invalid options."""
        for name, limit in (("max_loras", _MAX_SLOTS), ("max_lora_rank", _MAX_RANK)):
            require(1 <= getattr(self, name) <= limit, name, getattr(self, name), f"1 to {limit}")
        require(
            self.num_cpu_loras >= self.max_loras,
            "max_cpu_loras",
            self.max_cpu_loras,
            f"at least --max-loras, {self.max_loras}",
        )
        for name in ("lora_modules", "lora_dir", "allow_runtime_lora"):
            require(
                self.enable_lora or not getattr(self, name),
                name,
                getattr(self, name),
                "left out without --enable-lora",
            )
        for text in self.lora_modules:
            name, sign, path = text.partition("=")
            require(bool(name and sign and path), "lora_modules", repr(text), "NAME=PATH")
        require(
            not self.allow_runtime_lora or self.lora_dir is not None,
            "allow_runtime_lora",
            self.allow_runtime_lora,
            "off without --lora-dir",
        )


def folders_in(lora_dir: str | None) -> dict[str, Path]:
    """The folders of adapters in `--lora-dir`, by name."""
    if lora_dir is None or not Path(lora_dir).is_dir():
        return {}
    return {path.name: path for path in sorted(Path(lora_dir).iterdir()) if path.is_dir()}


def folders_of(lora_modules: Iterable[str]) -> dict[str, Path]:
    """The folders of `--lora-modules`, by name."""
    parted = (text.partition("=") for text in lora_modules)
    return {name: Path(path) for name, _, path in parted}


def collectives(config: EngineConfig) -> list[Collective]:
    return [COLLECTIVE] if config.enable_lora else []


def reserved_bytes(config: EngineConfig) -> int:
    """Memory of all adapters that may be loaded: the largest that are known, with what their layout adds."""
    if not config.enable_lora:
        return 0
    sizes = sorted(
        sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        for folder in (*folders_in(config.lora_dir).values(), *folders_of(config.lora_modules).values())
    )
    # One that a frontend has loaded later may be as large as any.
    largest = sizes[-config.num_cpu_loras :]
    if config.allow_runtime_lora and sizes:
        largest = [sizes[-1]] * config.num_cpu_loras
    # Panels of a low rank are padded, and weights may be stored in a narrower type than the model's.
    return 2 * sum(largest)
