"""Debian's packages that tests need: installed where this process may, so that no test is skipped.

    python3 -m tests.debian PACKAGE ...

installs those that are missing, and fails where one cannot be installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

_LIMIT_S = 900


def missing_packages(packages: Sequence[str]) -> list[str]:
    """Those of `packages` that are still missing after an attempt to install them, which root makes."""
    missing = _not_installed(packages)
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        _install(missing)
        missing = _not_installed(missing)
    return missing


def _not_installed(packages: Sequence[str]) -> list[str]:
    if not shutil.which("dpkg-query"):
        return list(packages)
    shown = ("dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *packages)
    known = subprocess.run(shown, capture_output=True, text=True, check=False).stdout.splitlines()
    return [package for package in packages if f"{package} installed" not in known]


def _install(packages: Sequence[str]) -> None:
    # A package that another one here conflicts with stays: then these are missing.
    # Another worker may be installing one: its lock is waited for.
    options = ("-y", "-q", "--no-install-recommends", "--no-remove", f"-oDPkg::Lock::Timeout={_LIMIT_S}")
    install = ("apt-get", "install", *options, *packages)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (("apt-get", "update", "-q"), install):
        subprocess.run(command, env=environment, capture_output=True, timeout=_LIMIT_S, check=False)


if __name__ == "__main__":
    if still_missing := missing_packages(sys.argv[1:]):
        sys.exit(f"as root: apt-get install {' '.join(still_missing)}")
