"""Tensors come out of a file as they went in, whole or in parts, and broken files are refused."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine_svc.model.errors import CheckpointError
from engine_svc.model.loading.checkpoint import weights_digest
from engine_svc.model.loading.folder import weight_files
from engine_svc.model.loading.loader import LoadOptions, load_model
from engine_svc.model.loading.safetensors_file import SafetensorsFile
from engine_svc.model.loading.weights import WeightReader, lazy_weights
from tests.engine_svc.model.checkpoints import make_checkpoint

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
    with pytest.raises(CheckpointError, match=r"a\.safetensors is truncated"):
        SafetensorsFile(file.path)


def test_a_file_cut_short_later_is_refused_when_read(cube):
    file, _ = cube
    file.path.write_bytes(file.path.read_bytes()[:-4])
    # The library writes the wider dtypes and then the names in order: the cube is not last.
    last = max(file.tensors.values(), key=lambda stored: stored.offset)
    with pytest.raises(CheckpointError, match=f"ended inside of {last.name}: it has changed"):
        file.read(last)


_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is truncated"),
        (b"{}", "is truncated"),
        (struct.pack("<Q", 9) + b"{}", "is truncated"),
        (b"\xff" * 8, "is not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "is not a safetensors file"),
        (struct.pack("<Q", 4) + b'{"x"', "is not a safetensors file"),
        (struct.pack("<Q", 8) + b'{"x": 1}', "is not a safetensors file"),
        (struct.pack("<Q", 2) + b"{}" + b"more", "is damaged: it has 14 bytes, its header describes 10"),
        (_LFS_POINTER, "is a pointer of Git LFS"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, content, reason):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.safetensors {reason}"):
        SafetensorsFile(tmp_path / "a.safetensors")


def test_a_dtype_that_torch_lacks_is_named(tmp_path):
    header = json.dumps({"x": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    with pytest.raises(CheckpointError, match="x has dtype F8_E8M0, which is not read"):
        SafetensorsFile(tmp_path / "a.safetensors")


# Weights come one by one, counted, in the dtype asked for, and take no more memory than that.

_ROOT = Path(__file__).parents[4]
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
    *files: Path, events: list[tuple[str, int, int]] | None = None, **options: object
) -> WeightReader:
    return WeightReader(
        list(files), lambda *event: events.append(event) if events is not None else None, **options
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


def test_new_tensors_of_a_body_have_its_prefix_as_those_they_replace(tmp_path):
    whole, new = tmp_path / "whole.safetensors", tmp_path / "new.safetensors"
    save_file({"embed_tokens.weight": torch.zeros(2, 2), "norm.weight": torch.zeros(2)}, whole)
    save_file({"norm.weight": torch.ones(2)}, new)
    file = SafetensorsFile(new)
    replaced = {name: (file, stored) for name, stored in file.tensors.items()}
    reader = reader_of(whole, body="model.", replaced=replaced)
    assert reader.read("model.norm.weight").tolist() == [1.0, 1.0]


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
    events: list[tuple[str, int, int]] = []
    reader = reader_of(file, events=events)
    size = file.stat().st_size
    reader.read("embedding")
    reader.read_slice("ids", 0, 1, 3)
    reader.finish()
    assert events == [
        ("weights", 0, size),
        ("weights", 48, size),
        ("weights", 48 + 16, size),
        ("weights", size, size),
    ]
    assert reader.unread() == ["norm"]


def test_progress_never_passes_the_total_however_often_a_tensor_is_read(file):
    events: list[tuple[str, int, int]] = []
    reader = reader_of(file, events=events)
    for _ in range(20):
        reader.read("embedding")
    assert max(done for _, done, _ in events) == file.stat().st_size


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
    events: list[tuple[str, int, int]] = []
    reader = reader_of(tmp_path / "model.safetensors", events=events)
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
    assert [done for _, done, _ in events] == [512 * count for count in range(65)]


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


# The digest_of distinguishes models, and costs no reading of them.


def write_checkpoint(
    folder: Path, checkpoint_tensors: dict[str, torch.Tensor], *, config: str = "{}", shards: int = 1
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config)
    if shards == 1:
        save_file(checkpoint_tensors, folder / "model.safetensors")
        return folder
    names = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(checkpoint_tensors)}
    for file in set(names.values()):
        save_file(
            {name: checkpoint_tensors[name] for name in checkpoint_tensors if names[name] == file},
            folder / file,
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return folder


def digest_of(folder: Path, dtype: torch.dtype = torch.float32) -> str:
    return weights_digest(folder, [SafetensorsFile(path) for path in weight_files(folder)], dtype)


def checkpoint_tensors(scale: float = 1.0) -> dict[str, torch.Tensor]:
    return {name: torch.arange(6000.0).reshape(60, 100) * scale for name in ("b", "a", "c")}


@pytest.mark.parametrize("shards", [1, 2])
def test_the_digest_is_of_config_headers_samples_and_dtype(tmp_path, shards):
    write_checkpoint(tmp_path, checkpoint_tensors(), shards=shards)
    wanted = hashlib.sha256(b"{}")
    for path in weight_files(tmp_path):
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        wanted.update(f"{path.name} {len(content)}".encode() + content[8 : 8 + length])
    for tensor in checkpoint_tensors().values():
        wanted.update(tensor.numpy().tobytes()[12_000 : 12_000 + 4096])
    wanted.update(b"torch.float32")
    assert digest_of(tmp_path) == wanted.hexdigest()


def test_the_same_files_elsewhere_have_the_same_digest(tmp_path):
    assert digest_of(write_checkpoint(tmp_path / "a", checkpoint_tensors())) == digest_of(
        write_checkpoint(tmp_path / "b", checkpoint_tensors())
    )


def test_other_values_config_names_or_dtype_have_another(tmp_path):
    digests = [
        digest_of(write_checkpoint(tmp_path / "a", checkpoint_tensors())),
        digest_of(write_checkpoint(tmp_path / "b", checkpoint_tensors(2.0))),
        digest_of(write_checkpoint(tmp_path / "c", checkpoint_tensors(), config="[]")),
        digest_of(write_checkpoint(tmp_path / "d", {**checkpoint_tensors(), "d": torch.zeros(1)})),
        digest_of(write_checkpoint(tmp_path / "a", checkpoint_tensors()), torch.bfloat16),
        digest_of(
            write_checkpoint(
                tmp_path / "e", {name: tensor.T.contiguous() for name, tensor in checkpoint_tensors().items()}
            )
        ),
    ]
    assert len(set(digests)) == len(digests)


def test_a_change_in_the_middle_of_any_one_tensor_is_seen(tmp_path):
    before = digest_of(write_checkpoint(tmp_path / "a", checkpoint_tensors()))
    for name in checkpoint_tensors():
        changed = checkpoint_tensors()
        changed[name][30, 5] += 1
        assert digest_of(write_checkpoint(tmp_path / "a", changed)) != before


@pytest.mark.parametrize("max_shard_size", ["50GB", "30KB"])
def test_both_implementations_and_every_quantization_see_the_same_model(tmp_path, max_shard_size):
    make_checkpoint("llama", tmp_path, max_shard_size=max_shard_size)
    all_options = (
        LoadOptions(num_threads=1, model_impl="native"),
        LoadOptions(num_threads=1, model_impl="transformers"),
        LoadOptions(num_threads=1, model_impl="native", quantization="int8"),
    )
    digests = {load_model(tmp_path, options).facts.weights_digest for options in all_options}
    assert digests == {digest_of(tmp_path)}
    assert load_model(
        tmp_path, LoadOptions(num_threads=1, dtype="bfloat16")
    ).facts.weights_digest == digest_of(tmp_path, torch.bfloat16)
