"""The engine's process: from flags to exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from triptych_kit.process.setup import importing, prepare_service, set_title


def main(argv: Sequence[str]) -> int:
    """Run an engine until SIGTERM. Returns the exit code."""
    prepare_service("engine")
    # Imported after the process is prepared: grpc reads the environment once, at import.
    with importing():
        from engine_svc.config import EngineConfig
        from engine_svc.process.run import run
        from triptych_kit.config import ConfigError, load_config, usage
        from triptych_kit.plugins import PluginError, load_plugins
        from triptych_kit.telemetry.logs import write_log_line

    if "--help" in argv:
        print(usage(EngineConfig, "triptych engine"))
        return 0
    try:
        loaded = load_config(EngineConfig, argv, service="engine")
        set_title("engine", loaded.config.index)
        load_plugins(loaded.config.plugins)
    except (ConfigError, PluginError) as error:
        write_log_line(f"triptych engine: {error}")
        return 2
    return run(loaded)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
