"""An engine whose steps are slow for as long as a test wants, so that what strikes strikes in their midst."""

from __future__ import annotations

from pathlib import Path

from tests.triptych_kit.plugin_folder import python_path, write_plugin

# A few hundred tokens take half a minute then, and a step is far from looking hung.
_SOURCE = """
import pathlib, time
def start():
    if b"engine" not in pathlib.Path("/proc/self/cmdline").read_bytes():
        return
    from engine_svc.runner.model_runner import ModelRunner
    execute, brake = ModelRunner.execute, pathlib.Path({brake!r})
    def slowed(self, plan):
        if brake.exists():
            time.sleep(0.1)
        return execute(self, plan)
    ModelRunner.execute = slowed
"""


class Brake:
    """A plugin for the services that are started with its `environment`: it slows their engines down."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "brake"
        site = folder / "brake-site"
        write_plugin(site, "braking", _SOURCE.format(brake=str(self._file)))
        self.environment = {"PYTHONPATH": python_path(site)}

    def apply(self) -> None:
        """From the next step on, each takes a tenth of a second."""
        self._file.touch()

    def release(self) -> None:
        """From the next step on, each takes the time that it needs."""
        self._file.unlink()
