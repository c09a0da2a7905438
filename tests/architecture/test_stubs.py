"""Generated code lies beside each proto. That it is fresh is what `make check` compares."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tools import contract_types

PROTOS = sorted((ROOT / "protos" / "triptych").rglob("*.proto"))


def test_there_are_protos() -> None:
    assert len(PROTOS) >= 5


@pytest.mark.parametrize("proto", PROTOS, ids=lambda path: path.stem)
def test_each_proto_has_its_stubs(proto: Path) -> None:
    for suffix in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py"):
        assert proto.with_name(proto.stem + suffix).exists()
    module = ".".join(proto.with_suffix("").relative_to(ROOT / "protos").parts)
    assert (
        importlib.import_module(module + "_pb2").DESCRIPTOR.name
        == proto.relative_to(ROOT / "protos").as_posix()
    )


@pytest.mark.parametrize("path", contract_types.FILES, ids=str)
def test_the_types_of_the_parameters_of_the_contract_are_up_to_date(path: Path) -> None:
    assert (ROOT / path).read_text() == contract_types.FILES[path](), "run: make protos"
