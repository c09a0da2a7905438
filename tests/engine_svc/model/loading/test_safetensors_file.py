"""Tensors come out of a file as they went in, whole or in parts, and broken files are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.safetensors_file import SafetensorsFile

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool,
)  # fmt: skip


def as_bytes(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.fixture
def cube(tmp_path: Path) -> tuple[SafetensorsFile, torch.Tensor]:
    tensor = torch.arange(3 * 5 * 7, dtype=torch.float32).reshape(3, 5, 7)
    save_file({"first": torch.zeros(9), "cube": tensor}, tmp_path / "a.safetensors")
    return SafetensorsFile(tmp_path / "a.safetensors"), tensor


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_read_as_it_was_written(tmp_path, dtype):
    tensor = torch.arange(2, 14).reshape(3, 4).to(dtype)
    save_file({"x": tensor}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    read = file.read(file.tensors["x"])
    assert (read.dtype, read.shape) == (dtype, (3, 4))
    assert as_bytes(read) == as_bytes(tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 4), (1,)], ids=str)
def test_odd_shapes_are_read(tmp_path, shape):
    tensor = torch.full(shape, 2.5)
    save_file({"x": tensor}, tmp_path / "a.safetensors")
    file = SafetensorsFile(tmp_path / "a.safetensors")
    assert torch.equal(file.read(file.tensors["x"]), tensor)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("start", "end"), [(0, 1), (1, 3), (0, 3), (2, 2)])
def test_a_slice_is_that_part_of_the_whole_contiguous_and_alone(cube, dim, start, end):
    file, tensor = cube
    part = file.read_slice(file.tensors["cube"], dim, start, end)
    assert torch.equal(part, tensor.narrow(dim, start, end - start))
    assert part.is_contiguous()
    assert part.untyped_storage().nbytes() == part.nbytes


def test_what_is_read_does_not_change_with_the_file(cube):
    file, tensor = cube
    read = file.read(file.tensors["cube"])
    part = file.read_slice(file.tensors["cube"], 2, 0, 3)
    with file.path.open("r+b") as writer:
        writer.seek(file.tensors["cube"].offset)
        writer.write(b"\xff" * file.tensors["cube"].num_bytes)
    assert torch.equal(read, tensor)
    assert torch.equal(part, tensor[:, :, :3])


def test_nothing_stays_mapped_or_open(cube):
    file, _ = cube
    file.read(file.tensors["cube"])
    file.read_slice(file.tensors["cube"], 1, 0, 2)
    assert str(file.path) not in Path("/proc/self/maps").read_text()
    assert file.path not in [path.resolve() for path in Path("/proc/self/fd").iterdir()]


def test_a_sample_is_the_middle_of_the_bytes(cube):
    file, tensor = cube
    num_bytes = tensor.nbytes
    assert list(file.sample(file.tensors["cube"], 8)) == as_bytes(tensor)[num_bytes // 2 : num_bytes // 2 + 8]
    assert len(file.sample(file.tensors["cube"], num_bytes)) == num_bytes - num_bytes // 2


def test_a_file_cut_short_is_refused_when_opened(cube):
    file, _ = cube
    file.path.write_bytes(file.path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read"):
        SafetensorsFile(file.path)


def test_a_file_cut_short_later_is_refused_when_read(cube):
    file, _ = cube
    file.path.write_bytes(file.path.read_bytes()[:-4])
    # The library writes the wider dtypes and then the names in order: the cube is not last.
    last = max(file.tensors.values(), key=lambda stored: stored.offset)
    with pytest.raises(CheckpointError, match=f"ended inside of {last.name}: it has changed"):
        file.read(last)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff" * 8, struct.pack("<Q", 2) + b"[]"], ids=repr)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_a_dtype_that_torch_lacks_is_named(tmp_path):
    header = json.dumps({"x": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match="x has dtype F8_E8M0, which is not read"):
        SafetensorsFile(tmp_path / "a.safetensors")
