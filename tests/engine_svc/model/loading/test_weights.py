"""Weights come one by one, counted, in the dtype asked for, and take no more memory than that."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.checkpoint import weight_files
from engine_svc.model.loading.weights import WeightReader, lazy_weights

_ROOT = Path(__file__).parents[3]
_MIB = 1024 * 1024

TENSORS = {
    "embedding": torch.arange(12, dtype=torch.float32).reshape(6, 2),
    "norm": torch.ones(4, dtype=torch.bfloat16),
    "ids": torch.arange(5, dtype=torch.int64),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def reader_of(
    *files: Path, told: list[tuple[str, int, int]] | None = None, **options: object
) -> WeightReader:
    return WeightReader(
        list(files), lambda *event: told.append(event) if told is not None else None, **options
    )


def test_names_and_shapes_are_known_before_anything_is_read(file):
    reader = reader_of(file)
    assert reader.names == set(TENSORS)
    assert reader.shape("embedding") == (6, 2)
    assert sorted(reader.unread()) == sorted(TENSORS)


def test_without_a_dtype_tensors_come_as_stored(file):
    reader = reader_of(file)
    for name, tensor in TENSORS.items():
        read = reader.read(name)
        assert read.dtype is tensor.dtype
        assert torch.equal(read, tensor)


def test_floating_point_tensors_come_in_the_dtype_and_integers_as_stored(file):
    reader = reader_of(file, dtype=torch.float16)
    assert reader.read("embedding").dtype is torch.float16
    assert reader.read_slice("norm", 0, 0, 2).dtype is torch.float16
    assert reader.read("ids").dtype is torch.int64
    reader.set_dtype(torch.float64)
    assert reader.read("norm").dtype is torch.float64


def test_tensors_come_on_the_device(file):
    assert reader_of(file, device="meta").read("ids").device.type == "meta"


def test_a_slice_is_read_and_counts_as_read(file):
    reader = reader_of(file)
    assert reader.read_slice("embedding", 0, 2, 4).tolist() == [[4.0, 5.0], [6.0, 7.0]]
    assert reader.read_slice("embedding", 1, 1, 2).tolist() == [[1.0], [3.0], [5.0], [7.0], [9.0], [11.0]]
    assert "embedding" not in reader.unread()


@pytest.mark.parametrize(("dim", "start", "end"), [(0, 0, 7), (0, -1, 2), (0, 3, 2), (2, 0, 1), (-1, 0, 1)])
def test_a_slice_outside_of_the_tensor_is_refused(file, dim, start, end):
    with pytest.raises(CheckpointError, match=r"embedding has shape \(6, 2\)"):
        reader_of(file).read_slice("embedding", dim, start, end)


def test_a_name_that_no_file_has_is_refused(file):
    with pytest.raises(CheckpointError, match="the checkpoint lacks head"):
        reader_of(file).read("head")


def test_of_a_name_in_two_files_the_later_is_meant(file):
    other = file.with_name("other.safetensors")
    save_file({"norm": torch.zeros(4)}, other)
    assert reader_of(file, other).read("norm").tolist() == [0.0] * 4


def test_progress_counts_bytes_up_to_the_files_size(file):
    told: list[tuple[str, int, int]] = []
    reader = reader_of(file, told=told)
    size = file.stat().st_size
    reader.read("embedding")
    reader.read_slice("ids", 0, 1, 3)
    reader.finish()
    assert told == [
        ("weights", 0, size),
        ("weights", 48, size),
        ("weights", 48 + 16, size),
        ("weights", size, size),
    ]
    assert reader.unread() == ["norm"]


def test_progress_never_passes_the_total_however_often_a_tensor_is_read(file):
    told: list[tuple[str, int, int]] = []
    reader = reader_of(file, told=told)
    for _ in range(20):
        reader.read("embedding")
    assert max(done for _, done, _ in told) == file.stat().st_size


def test_the_main_dtype_is_that_of_the_first_floating_point_tensor(file):
    assert reader_of(file).main_dtype() in (torch.float32, torch.bfloat16)
    save_file({"ids": TENSORS["ids"]}, file)
    assert reader_of(file).main_dtype() is None


def test_lazy_weights_are_read_when_they_are_sliced(file):
    reader = reader_of(file)
    lazy = lazy_weights(reader)
    assert sorted(reader.unread()) == sorted(TENSORS)
    assert torch.equal(lazy["embedding"][...], TENSORS["embedding"])
    assert sorted(reader.unread()) == ["ids", "norm"]


def test_several_threads_may_read(tmp_path):
    save_file({f"t{index}": torch.full((64,), index) for index in range(64)}, tmp_path / "model.safetensors")
    told: list[tuple[str, int, int]] = []
    reader = reader_of(tmp_path / "model.safetensors", told=told)
    names = sorted(reader.names)
    read: dict[str, torch.Tensor] = {}

    def work(start: int) -> None:
        for name in names[start::4]:
            read[name] = reader.read(name)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(read[f"t{index}"], torch.full((64,), index)) for index in range(64))
    assert reader.unread() == []
    assert [done for _, done, _ in told] == [512 * count for count in range(65)]


_READ_ONE_BY_ONE = """
import resource, sys
from pathlib import Path
import torch
from engine_svc.model.loading.weights import WeightReader

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

reader = WeightReader([Path(sys.argv[1])], lambda *event: None, dtype=torch.float32)
torch.ones(4).sum()
before = peak()
for name in sorted(reader.names):
    reader.read(name).sum()
    reader.read_slice(name, 1, 0, 512).sum()
print(peak() - before)
"""


def test_reading_takes_the_memory_of_one_tensor_and_not_of_the_file(tmp_path):
    count, rows = 12, 4096
    save_file(
        {f"t{index}": torch.zeros(rows, 1024) for index in range(count)}, tmp_path / "model.safetensors"
    )
    paths = os.pathsep.join(str(_ROOT / part) for part in (".", "kernels"))
    finished = subprocess.run(
        (sys.executable, "-c", _READ_ONE_BY_ONE, str(tmp_path / "model.safetensors")),
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    # A tensor, the half of it that a slice is, and the same again while it is mapped to be cut.
    assert int(finished.stdout) < 3 * rows * 1024 * 4 < count * rows * 1024 * 4 // 3


def test_shards_are_read_as_the_one_file_they_come_from(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = reader_of(*weight_files(tmp_path))
    shards = tmp_path / "shards"
    shards.mkdir()
    index = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        index[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, shards / index[name])
    (shards / "model.safetensors.index.json").write_text(f'{{"weight_map": {index!s}}}'.replace("'", '"'))
    sharded = reader_of(*weight_files(shards))
    assert sharded.names == whole.names
    assert all(torch.equal(sharded.read(name), whole.read(name)) for name in whole.names)
