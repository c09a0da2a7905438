"""The files of a release that others generate code from."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from tests.protos.contract_descriptors import proto_files

ROOT = Path(__file__).resolve().parents[2]
STANDARD = {
    "google/rpc/code.proto",
    "google/rpc/error_details.proto",
    "google/rpc/status.proto",
    "grpc/health/v1/health.proto",
}

pytestmark = pytest.mark.network


def test_descriptor_set_and_module_of_a_release_are_complete_and_equal(tmp_path: Path) -> None:
    command = ["make", "contract", f"DIST={tmp_path}", f"VENV={sys.prefix}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    (archive,) = tmp_path.glob("triptych-contract-*.tar.gz")
    (released,) = tmp_path.glob("triptych-contract-*.binpb")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    module = tmp_path / archive.name.removesuffix(".tar.gz")
    buf = Path(sys.prefix) / "node" / "node_modules" / ".bin" / "buf"
    built = tmp_path / "built.binpb"
    subprocess.run(
        [buf, "build", "--as-file-descriptor-set", "-o", built], cwd=module, check=True, timeout=60
    )
    assert describe(released) == describe(built)
    own = {name for name in describe(built) if not name.startswith("google/protobuf/")}
    assert own == {*proto_files(), *STANDARD}
    assert (module / "engine-session.md").exists()


def describe(path: Path) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    return {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(path.read_bytes()).file}
