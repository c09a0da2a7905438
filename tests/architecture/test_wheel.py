"""What the wheel puts into site-packages: no name that another project may own."""

from __future__ import annotations

import tomllib

from setuptools import find_packages  # type: ignore[import-untyped]

from tests.architecture.sources import ROOT

OWN_NAMES = ("triptych", "frontend_svc", "engine_svc", "coordinator_svc")


def test_every_top_level_package_has_a_name_of_this_project() -> None:
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    find = configuration["tool"]["setuptools"]["packages"]["find"]
    packages = [
        package
        for folder in find["where"]
        for package in find_packages(str(ROOT / folder), include=find["include"])
    ]
    names = {package.split(".")[0] for package in packages}
    assert {"triptych", "triptych_kit", "triptych_cli", "engine_svc"} <= names
    assert {name for name in names if not name.startswith("triptych") and name not in OWN_NAMES} == set()
