"""The contract as protoc sees it, with comments: what the tests of the contract walk over."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import descriptor_pb2

PROTO_ROOT = Path(__file__).parents[2] / "protos"


@dataclass(frozen=True, slots=True)
class Element:
    """A message, field, oneof, enum, enum value, service or RPC, and the comment above it."""

    file: str
    name: str
    comment: str


def proto_files() -> list[str]:
    """Every .proto of the contract, relative to the source root."""
    return sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))


def run_protoc(*arguments: str) -> None:
    """Run the protoc that generates the committed code over the whole contract."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}", *arguments, *proto_files()]
    subprocess.run(command, check=True, capture_output=True, text=True)


def load_descriptors(folder: Path) -> list[descriptor_pb2.FileDescriptorProto]:
    """The contract's files with their comments; `folder` takes what protoc writes."""
    output = folder / "contract.binpb"
    run_protoc("--include_source_info", f"--descriptor_set_out={output}")
    return list(descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file)


def comments_of(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """The comment above each element, by its path in the file."""
    return {tuple(at.path): at.leading_comments.strip() for at in file.source_code_info.location}


def elements(file: descriptor_pb2.FileDescriptorProto) -> Iterator[Element]:
    """Everything in `file` that must be commented."""
    comments = comments_of(file)

    def found(path: tuple[int, ...], name: str) -> Element:
        return Element(file.name, name, comments.get(path, ""))

    for i, message in enumerate(file.message_type):
        yield found((4, i), message.name)
        for j, field in enumerate(message.field):
            yield found((4, i, 2, j), field.name)
        for j, oneof in enumerate(message.oneof_decl):
            # The compiler makes a oneof of each `optional` field, which is not in the file.
            if not oneof.name.startswith("_"):
                yield found((4, i, 8, j), oneof.name)
    for i, enum in enumerate(file.enum_type):
        yield found((5, i), enum.name)
        for j, value in enumerate(enum.value):
            yield found((5, i, 2, j), value.name)
    for i, service in enumerate(file.service):
        yield found((6, i), service.name)
        for j, method in enumerate(service.method):
            yield found((6, i, 2, j), method.name)
