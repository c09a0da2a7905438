"""Options of `make test-acceptance`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--maskbench", help="folder of MaskBench: its schemas, too")
    parser.addoption("--model", help="checkpoint folder, in place of the embedded model")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "corpus" in metafunc.fixturenames:
        maskbench = metafunc.config.getoption("--maskbench", None)
        metafunc.parametrize("corpus", ["own", *([maskbench] if maskbench else [])])
