"""The three services as programs: their main functions and configurations, imported on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from triptych_kit.process.setup import child_command

SERVICES = ("coordinator", "engine", "frontend")

# The health name that becomes SERVING when a service is ready.
READINESS = {
    "coordinator": "triptych.coordinator.v1.CoordinatorService",
    "engine": "triptych.engine.v1.EngineCoreService",
    "frontend": "triptych.api.v1.InferenceService",
}

_CONFIG_NAMES = {"coordinator": "CoordinatorConfig", "engine": "EngineConfig", "frontend": "FrontendConfig"}


def main_of(service: str) -> Callable[[Sequence[str]], int]:
    """Import a service and return its `main(argv)`."""
    main: Callable[[Sequence[str]], int] = import_module(f"{service}_svc.main").main
    return main


def config_of(service: str) -> type:
    """The configuration dataclass of a service; imports only its light config module."""
    config: type = vars(import_module(f"{service}_svc.config"))[_CONFIG_NAMES[service]]
    return config


def command_of(service: str) -> tuple[str, ...]:
    """The command line that runs a service as a child of this process, to be followed by its flags."""
    return child_command(f"{service}_svc.main")


def embedded_model() -> Path:
    """The folder of the small model that ships with the package."""
    return Path(__file__).parent / "tiny_model" / "weights"
