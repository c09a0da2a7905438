"""Packed weights that are kept: read in place of packing, made anew where they do not fit, never needed."""

from __future__ import annotations

import fcntl
import itertools
import logging
import mmap
import os
import resource
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from gguf import GGMLQuantizationType

from engine_svc.build.runner import free_memory, load_options
from engine_svc.build.speculation import make_proposer
from engine_svc.config import EngineConfig
from engine_svc.model.loading.gguf.folder import open_as_folder
from engine_svc.model.loading.loader import LoadedModel, LoadOptions, load_model
from engine_svc.model.loading.packed_file import BrokenFile, num_bytes_of, read_file, write_file
from engine_svc.model.loading.packed_weights import PackedWeightsOptions
from engine_svc.model.native.exchange import ExpertShare, NoExchange
from engine_svc.model.parallel import Parallel, Solo
from tests.engine_svc.model.checkpoints import make_checkpoint
from tests.engine_svc.model.loading.gguf.gguf_models import write_model
from tests.engine_svc.model.native.test_native_decoder import logits_in_chunks, some_tokens
from triptych_kernels import PackedParts, ops_for

OPS = ops_for(torch.device("cpu"))
POPULATE = 22  # MADV_POPULATE_READ
NOT_KEPT, BROKEN = "packed weights are not kept", "packed weights that were kept cannot be read"

pytestmark = pytest.mark.skipif(OPS.name == "reference", reason="the native kernels cannot run here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_checkpoint("llama", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def kept(tmp_path: Path) -> PackedWeightsOptions:
    return PackedWeightsOptions(tmp_path / "kept", max_bytes=1 << 30, min_bytes=0)


def load(
    folder: Path, kept: PackedWeightsOptions | None, *, parallel: Parallel | None = None, **options: object
) -> tuple[LoadedModel, int]:
    """The model, and the bytes of weights that were read for it."""
    read: list[int] = []
    chosen = LoadOptions(**{"num_threads": 1, "device": "cpu", "dtype": "float32", **options})
    loaded = load_model(
        folder,
        replace(chosen, packed_weights=kept),
        parallel=parallel,
        progress=lambda phase, done, total: read.append(done),
    )
    # Not the last event, which says that reading is over.
    return loaded, read[-2]


def logits(loaded: LoadedModel) -> torch.Tensor:
    token_ids = some_tokens()
    return logits_in_chunks(loaded, token_ids, [len(token_ids)])


def files_of(kept: PackedWeightsOptions) -> list[Path]:
    return sorted(kept.folder.glob("*.packed"))


class SecondRank(Solo):
    tp_rank, tp_size = 1, 2


def make_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its head is separate, so that its table is packed, too; its types differ within a projection."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = make_checkpoint("llama", tmp_path / "wide", tie_word_embeddings=False).config
    kinds = {"v_proj": GGMLQuantizationType.Q8_0, "up_proj": GGMLQuantizationType.Q5_1}

    def kind_of(name: str) -> GGMLQuantizationType:
        return kinds.get(name.split(".")[-2], GGMLQuantizationType.Q4_0)

    write_model(tmp_path / "wide", config, tmp_path / "model.gguf", tmp_path / "full", kind_of)
    return open_as_folder(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"quantization": "int8"}),
        ("qwen2", {}),  # with biases
        ("gemma3", {}),
        ("mixtral", {}),
        ("gpt_oss", {}),
        ("gguf", {"activations": "int8"}),
    ],
)
def test_a_second_start_reads_what_the_first_one_packed(family, options, tmp_path, kept, monkeypatch):
    if family == "gguf":
        folder = make_gguf(tmp_path, monkeypatch)
    else:
        folder = tmp_path / family
        make_checkpoint(family, folder)
    plain, num_all = load(folder, None, **options)
    first, _ = load(folder, kept, **options)
    (path,) = files_of(kept)
    before = path.stat()
    os.utime(path, (0, 0))
    second, num_read = load(folder, kept, **options)
    assert num_read < num_all / 2
    for each in (first, second):
        assert torch.equal(logits(each), logits(plain))
        assert each.facts == plain.facts
        assert each.activations == plain.activations
        assert each.model.num_bytes == plain.model.num_bytes
    after = path.stat()
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size)
    # By this the oldest is found.
    assert after.st_mtime > 0
    assert [each.name for each in kept.folder.iterdir()] == [path.name]


@pytest.mark.parametrize("parallel", [Solo(), SecondRank()], ids=["whole", "rank"])
def test_a_loaded_model_writes_what_the_next_start_reads(parallel, folder, kept):
    loaded, num_all = load(folder, None, parallel=parallel)
    path = loaded.model.packed.save(kept.folder)
    assert path.stat().st_mode & 0o777 == 0o644
    # Small weights, too, which a start by itself does not keep.
    second, num_read = load(folder, replace(kept, min_bytes=1 << 30), parallel=parallel)
    assert num_read < num_all / 2
    if parallel.tp_size == 1:
        assert torch.equal(logits(second), logits(loaded))
    # One that was read is written again in the same way.
    content = path.read_bytes()
    assert second.model.packed.save(kept.folder) == path
    assert path.read_bytes() == content
    assert files_of(kept) == [path]


def test_a_folder_that_is_not_safe_gets_no_weights(folder, kept):
    kept.folder.mkdir()
    kept.folder.chmod(0o1777)
    loaded, _ = load(folder, None)
    with pytest.raises(OSError, match="all users may write it"):
        loaded.model.packed.save(kept.folder)
    assert not list(kept.folder.iterdir())


def change_time(folder: Path) -> None:
    os.utime(folder / "model.safetensors", ns=(1, 1))


def change_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text() + "\n")


def replace_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    stat, content = path.stat(), path.read_bytes()
    # Another inode, as the first still is one.
    path.rename(folder / "former")
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [change_time, change_config, replace_file])
def test_other_files_are_packed_again(change, folder, kept):
    load(folder, kept)
    change(folder)
    load(folder, kept)
    assert len(files_of(kept)) == 2


@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"parallel": SecondRank()}, {"cpu_isa": "avx2"}],
    ids=lambda options: next(iter(options)),
)
def test_another_layout_has_a_file_of_its_own(options, folder, kept):
    if options.get("cpu_isa") == OPS.name.rpartition("-")[2]:
        pytest.skip("this CPU has one layout")
    load(folder, kept)
    load(folder, kept, **options)
    assert len(files_of(kept)) == 2


def cut(content: bytes) -> bytes:
    return content[:-4096]


def empty(content: bytes) -> bytes:
    return b""


def other_magic(content: bytes) -> bytes:
    return b"?" + content[1:]


def other_version(content: bytes) -> bytes:
    return content[:16] + struct.pack("<I", 2) + content[20:]


def other_header(content: bytes) -> bytes:
    return content.replace(b'"notes"', b'"nodes"', 1)


def longer(content: bytes) -> bytes:
    return content + bytes(64)


@pytest.mark.parametrize("damage", [cut, empty, other_magic, other_version, other_header, longer])
def test_a_broken_file_is_made_anew(damage: Callable[[bytes], bytes], folder, kept, caplog):
    expected = logits(load(folder, kept)[0])
    (path,) = files_of(kept)
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert path.read_bytes() != content
    assert torch.equal(logits(load(folder, kept)[0]), expected)
    assert BROKEN in caplog.text
    assert path.read_bytes() == content


@pytest.mark.parametrize("place", ["file/folder", "file"])
def test_a_folder_that_cannot_be_written_is_a_warning(place, folder, kept, tmp_path, caplog):
    (tmp_path / "file").touch()
    expected = logits(load(folder, None)[0])
    loaded, _ = load(folder, replace(kept, folder=tmp_path / place))
    assert torch.equal(logits(loaded), expected)
    assert NOT_KEPT in caplog.text


def test_a_folder_that_all_users_may_write_is_not_used(folder, kept, caplog):
    _, num_all = load(folder, kept)
    before = [path.stat().st_mtime_ns for path in files_of(kept)]
    kept.folder.chmod(0o1777)
    loaded, num_read = load(folder, kept)
    assert num_read == num_all
    assert "all users may write it" in caplog.records[-1].reason
    assert [path.stat().st_mtime_ns for path in files_of(kept)] == before
    assert logits(loaded).isfinite().all()


def make_foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 1 << 16)
    else:
        os.chown(path, 1 << 16, -1)


def test_a_folder_of_another_user_is_not_used(folder, kept, monkeypatch, caplog):
    kept.folder.mkdir()
    make_foreign(kept.folder, monkeypatch)
    load(folder, kept)
    assert "belongs to user" in caplog.records[-1].reason
    assert not list(kept.folder.iterdir())


@pytest.mark.parametrize("how", ["owner", "mode"])
def test_a_file_that_others_may_have_written_is_not_read(how, folder, kept, monkeypatch, caplog):
    _, num_all = load(folder, kept)
    (path,) = files_of(kept)
    if how == "mode":
        path.chmod(0o666)
    else:
        make_foreign(path, monkeypatch)
    assert load(folder, kept)[1] == num_all
    assert BROKEN in caplog.text


def test_a_link_in_the_place_of_an_unfinished_file_is_not_followed(folder, kept, tmp_path):
    load(folder, kept)
    (path,) = files_of(kept)
    path.unlink()
    other = tmp_path / "other"
    other.write_text("other")
    path.with_suffix(".unfinished").symlink_to(other)
    load(folder, kept)
    assert other.read_text() == "other"
    assert [each.name for each in kept.folder.iterdir()] == [path.name]


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file gets longer than a page."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_file_that_cannot_be_finished_leaves_nothing(folder, kept, small_disk, caplog):
    loaded, _ = load(folder, kept)
    assert NOT_KEPT in caplog.text
    assert not list(kept.folder.iterdir())
    assert logits(loaded).isfinite().all()


def test_what_was_not_used_for_longest_is_removed(folder, kept, caplog):
    caplog.set_level(logging.INFO)
    load(folder, kept)
    (path,) = files_of(kept)
    size = path.stat().st_size
    oldest, newer = kept.folder / "b.packed", kept.folder / "a.packed"
    for other, used_at in ((oldest, 1), (newer, 2)):
        other.write_bytes(bytes(size))
        os.utime(other, (used_at, used_at))
    abandoned = kept.folder / "c.unfinished"
    abandoned.touch()
    os.utime(abandoned, (1, 1))
    # Room for three; the new one is the fourth.
    load(folder, replace(kept, max_bytes=3 * size), dtype="bfloat16")
    names = {each.name for each in kept.folder.iterdir()}
    assert len(names) == 3
    assert {newer.name, path.name} < names


@pytest.mark.parametrize(
    ("capacity", "left"), [(0.9, {"old", "newer"}), (1.1, {"new"}), (1.5, {"newer", "new"})]
)
def test_on_a_full_disk_new_weights_replace_what_was_not_used_for_longest(
    capacity, left, folder, kept, monkeypatch, caplog
):
    num_bytes = num_bytes_of(load(folder, kept)[0].model.packed.entries)
    (path,) = files_of(kept)
    path.unlink()
    for used_at, name in enumerate(("old", "newer")):
        other = kept.folder / f"{name}.packed"
        other.write_bytes(bytes(int(0.4 * num_bytes)))
        os.utime(other, (used_at, used_at))

    def disk_usage(folder: Path) -> SimpleNamespace:
        used = sum(each.stat().st_size for each in files_of(kept))
        return SimpleNamespace(free=int(capacity * num_bytes) - used)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    load(folder, kept)
    names = {"new" if each == path else each.stem for each in files_of(kept)}
    # Where it would have no room by itself, nothing is removed for it.
    assert names == left
    assert (NOT_KEPT in caplog.text) == ("new" not in left)


def test_of_files_whose_room_stays_taken_one_is_removed(folder, kept, monkeypatch, caplog):
    num_bytes = num_bytes_of(load(folder, kept)[0].model.packed.entries)
    (path,) = files_of(kept)
    path.unlink()
    for used_at in range(4):
        other = kept.folder / f"{used_at}.packed"
        other.write_bytes(bytes(int(0.3 * num_bytes)))
        os.utime(other, (used_at, used_at))
    # An engine that has a file open keeps its room.
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=num_bytes // 2))
    load(folder, kept)
    assert {each.stem for each in files_of(kept)} == {"1", "2", "3"}
    assert NOT_KEPT in caplog.text


def test_more_than_the_limit_and_too_little_are_not_kept(folder, kept, caplog):
    load(folder, replace(kept, min_bytes=1 << 20))
    assert not kept.folder.exists()
    assert not caplog.text
    load(folder, replace(kept, max_bytes=1000))
    assert not list(kept.folder.iterdir())
    assert "more than its limit of 1000" in caplog.records[0].reason


def test_what_may_not_be_written_is_read_where_it_is_there(folder, kept):
    reading = replace(kept, is_written=False)
    _, num_all = load(folder, reading)
    assert not kept.folder.exists()
    load(folder, kept)
    assert load(folder, reading)[1] < num_all / 2


class Waiting(logging.Handler):
    """Is set once an engine waits for another."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waiting for another process" in record.msg:
            self.has_begun.set()


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_engine_waits_for_one_that_packs_the_same(is_kept, folder, kept, caplog):
    _, num_all = load(folder, kept)
    (path,) = files_of(kept)
    content = path.read_bytes()
    path.unlink()
    waiting, logger = Waiting(), logging.getLogger("engine_svc.model.loading.packed_weights")
    caplog.set_level(logging.INFO, logger.name)
    logger.addHandler(waiting)
    lock = path.with_suffix(".lock")
    with lock.open("wb") as other, ThreadPoolExecutor(1) as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        load(folder, replace(kept, wait_s=0.0))
        assert NOT_KEPT in caplog.text
        assert not path.exists()
        waits = pool.submit(load, folder, kept)
        assert waiting.has_begun.wait(60.0)
        if is_kept:
            path.write_bytes(content)
        lock.unlink()
        fcntl.flock(other, fcntl.LOCK_UN)
        # What one could not keep, others do not try one after the other.
        assert (waits.result()[1] < num_all / 2) == is_kept
        assert path.exists() == is_kept
    logger.removeHandler(waiting)


def test_of_several_that_start_at_once_one_writes(folder, kept, caplog):
    caplog.set_level(logging.INFO)
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda _: load(folder, kept)[0], range(4)))
    assert sum(record.msg == "packed weights kept" for record in caplog.records) == 1
    assert all(torch.equal(logits(each), logits(loaded[0])) for each in loaded)
    assert len(list(kept.folder.iterdir())) == 1


def test_stores_to_what_is_read_do_not_reach_the_file(tmp_path):
    path = tmp_path / "some.packed"
    tensors = (torch.arange(3, dtype=torch.int32), torch.ones(2, 1 << 20, dtype=torch.bfloat16))
    write_file(path, {"one": PackedParts({"a": [1]}, tensors), "none": PackedParts(None, ())}, {"n": 1})
    found = read_file(path)
    assert found.notes == {"n": 1}
    assert found.entries["none"] == PackedParts(None, ())
    for _ in range(2):
        for ours, theirs in zip(found.entries["one"].tensors, tensors, strict=True):
            assert torch.equal(ours, theirs)
            assert ours.data_ptr() % 64 == 0
            ours.zero_()
        found = read_file(path)
    path.write_bytes(b"?" * 1000)
    with pytest.raises(BrokenFile, match="begins with"):
        read_file(path)


class RecordingMap(mmap.mmap):
    """Remembers what was asked of the system in one call, in which no other thread runs."""

    calls: ClassVar[list[tuple[int, ...]]] = []

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        self.calls.append((option, start, len(self) if length is None else length))
        super().madvise(option, start, len(self) if length is None else length)


def test_other_threads_run_while_a_file_is_read(tmp_path, monkeypatch):
    path = tmp_path / "some.packed"
    write_file(path, {"one": PackedParts(None, (torch.ones(40 << 20, dtype=torch.uint8),))}, {})
    RecordingMap.calls.clear()
    monkeypatch.setattr(mmap, "mmap", RecordingMap)
    assert read_file(path).entries["one"].tensors[0].sum() == 40 << 20
    pieces = [(start, length) for option, start, length in RecordingMap.calls if option == POPULATE]
    assert max(length for _, length in pieces) <= 16 << 20
    assert pieces[0][0] == 0
    assert all(start + length == following for (start, length), (following, _) in itertools.pairwise(pieces))
    assert sum(pieces[-1]) == path.stat().st_size


def test_experts_that_may_leave_the_memory_alone_are_not_kept(tmp_path, kept):
    make_checkpoint("mixtral", tmp_path / "mixtral")
    share = ExpertShare(0, 2, NoExchange())
    options = LoadOptions(num_threads=1, device="cpu", packed_weights=kept)
    load_model(tmp_path / "mixtral", options, share=share)
    assert not kept.folder.exists()


def test_where_packed_weights_are_kept_is_an_option(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def of(**options: object) -> PackedWeightsOptions | None:
        return load_options(EngineConfig(model="any", **options)).packed_weights

    assert of(packed_weights_cache="off") is None
    auto, given = of(), of(packed_weights_cache="/else", packed_weights_cache_size=5)
    assert auto is not None
    assert auto.folder == tmp_path / "triptych" / "weights"
    assert given == replace(auto, folder=Path("/else"), max_bytes=5)


def test_shared_weights_are_no_free_memory(folder):
    loaded, _ = load(folder, None)
    config = EngineConfig(model=str(folder))
    sharing = free_memory(config, replace(loaded, shared_bytes=1 << 60))
    assert sharing.num_bytes == 0 < free_memory(config, loaded).num_bytes


def test_a_draft_model_is_packed_once_and_shared_and_no_free_memory(folder, kept):
    loaded, _ = load(folder, None)
    (folder / "tokenizer.json").write_text("{}")
    config = EngineConfig(
        model=str(folder), speculative="draft", speculative_model=str(folder), max_num_seqs=2, num_threads=1
    )
    options = replace(load_options(config), packed_weights=kept)
    first, second = (make_proposer(config, loaded, options) for _ in range(2))
    assert len(files_of(kept)) == 1
    unshared = make_proposer(config, loaded, replace(options, packed_weights=None))
    assert first.num_bytes == second.num_bytes > unshared.num_bytes
