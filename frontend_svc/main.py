"""Entry point of the frontend process."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from triptych_kit.process.setup import importing, prepare_service, set_title


def main(argv: Sequence[str]) -> int:
    """Run a frontend until SIGTERM. Returns the exit code."""
    prepare_service("frontend")
    # Imported after the process is prepared: grpc reads its environment once, at import.
    with importing():
        from frontend_svc.config import FrontendConfig
        from frontend_svc.process.run import run
        from triptych_kit.config import ConfigError, load_config, usage
        from triptych_kit.plugins import PluginError, load_plugins
        from triptych_kit.telemetry.logs import write_log_line

    if "--help" in argv:
        print(usage(FrontendConfig, "triptych frontend"))
        return 0
    try:
        loaded = load_config(FrontendConfig, argv, service="frontend")
        set_title("frontend", loaded.config.index or None)
        if loaded.config.workers > 1:
            from frontend_svc.process.workers import run_workers

            # This process serves nothing itself: the workers load the plugins.
            return run_workers(loaded, argv)
        load_plugins(loaded.config.plugins)
    except (ConfigError, PluginError) as error:
        write_log_line(f"triptych frontend: {error}")
        return 2
    return run(loaded)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
