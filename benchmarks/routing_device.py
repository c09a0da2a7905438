"""A plugin of engines: each step takes the time of a device of its own, for which no processor works.

Runs in the engine's process. Engines that share a few cores would else slow each other down: what a policy
leaves to one of them another one would be the faster for.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

VARIABLE = "ROUTING_DEVICE_US"
_STEP_S = 0.001  # however few tokens it has


def write_distribution(folder: Path) -> None:
    """Make `folder` what pip would make of a package with this plugin; for PYTHONPATH."""
    facts = folder / "triptych_routing_device-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: triptych-routing-device\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[triptych.plugins]\nrouting_device = {__name__}:install\n")


def install() -> None:
    """Give every model runner of this process a device's time a token; the plugin's entry point."""
    from engine_svc.runner.model_runner import ModelRunner

    device = _Device(int(os.environ[VARIABLE]) / 1e6)
    build: Callable = ModelRunner.__init__

    @functools.wraps(build)
    def build_with_device(
        runner: object, *arguments: object, hooks: Sequence[object] = (), **options: object
    ) -> None:
        build(runner, *arguments, hooks=[*hooks, device], **options)

    ModelRunner.__init__ = build_with_device  # type: ignore[method-assign,assignment]


class _Device:
    """Waits for as long as the step's tokens take."""

    def __init__(self, token_s: float) -> None:
        self._token_s = token_s

    def before_forward(self, plan, batch) -> None:
        """The device has not begun."""

    def after_forward(self, plan, batch) -> None:
        """Return when the device is done."""
        time.sleep(_STEP_S + self._token_s * plan.total_num_tokens)
