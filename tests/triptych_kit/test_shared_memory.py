"""Segments: made whole, read with care, gone with the process that made them."""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.processes import running
from triptych_kit import shared_memory

OWNER = f"owner-{os.getpid()}"
# Makes segments of 10 MB without end, and takes every other away again.
SENDER = """
import itertools, sys
from triptych_kit import shared_memory
content = bytes(10_000_000)
kept = []
for number in itertools.count():
    name = shared_memory.segment_name(sys.argv[1], number)
    kept.append(shared_memory.create(name, content))
    print(number, flush=True)
    if len(kept) == 3:
        kept.pop(0).close()
"""


@pytest.fixture
def names() -> Iterator[list[str]]:
    made = [shared_memory.segment_name(OWNER, number) for number in range(4)]
    yield made
    for name in made:
        (shared_memory.FOLDER / name).unlink(missing_ok=True)


def left_of(owner_id: str) -> list[str]:
    return [name for name in os.listdir(shared_memory.FOLDER) if shared_memory.is_name_of(name, owner_id)]


def test_a_segment_is_there_whole_for_this_user_alone_and_frees_its_memory_when_taken(names):
    segment = shared_memory.create(names[0], b"0123456789")
    mode = (shared_memory.FOLDER / names[0]).stat().st_mode
    assert (stat.S_IMODE(mode), segment.size_bytes, segment.is_taken) == (0o600, 10, False)
    assert shared_memory.read(names[0], 3, 4) == b"3456"
    shared_memory.remove(names[0])
    assert segment.is_taken
    segment.close()
    segment.close()
    assert left_of(OWNER) == []


def test_a_name_is_given_once(names):
    segment = shared_memory.create(names[0], b"first")
    with pytest.raises(FileExistsError):
        shared_memory.create(names[0], b"second")
    assert shared_memory.read(names[0], 0, 5) == b"first"
    segment.close()


def test_names_of_others_and_paths_are_no_names(names):
    assert shared_memory.is_name_of(names[1], OWNER)
    assert not shared_memory.is_name_of(names[1], "somebody else")
    for name in ("../etc/passwd", f"{names[1]}/x", f"{names[1]}x", f"x{names[1]}", "triptych-0-1", "", "\0"):
        assert not shared_memory.is_name_of(name, OWNER)
        with pytest.raises(ValueError, match="not the name"):
            shared_memory.read(name, 0, 1)


@pytest.mark.parametrize(("offset", "size"), [(0, 11), (10, 1), (2**63, 1), (0, 2**40)])
def test_nothing_is_read_behind_the_end(names, offset, size):
    segment = shared_memory.create(names[0], b"0123456789")
    with pytest.raises(ValueError, match="has 10 bytes"):
        shared_memory.read(names[0], offset, size)
    segment.close()


def test_links_pipes_and_files_that_others_may_read_are_no_segments(names):
    target = shared_memory.create(names[0], b"secret")
    (shared_memory.FOLDER / names[1]).symlink_to(shared_memory.FOLDER / names[0])
    os.mkfifo(shared_memory.FOLDER / names[2], 0o600)
    (shared_memory.FOLDER / names[3]).write_bytes(b"public")
    (shared_memory.FOLDER / names[3]).chmod(0o644)
    with pytest.raises(OSError):
        shared_memory.read(names[1], 0, 1)
    for name in names[2:]:
        with pytest.raises(ValueError, match="not a segment"):
            shared_memory.read(name, 0, 1)
    target.close()


def test_a_sweep_removes_segments_without_an_owner_and_no_other(names):
    mine = shared_memory.create(names[0], b"mine")
    (shared_memory.FOLDER / names[1]).write_bytes(b"left by a dead process")
    other = shared_memory.FOLDER / f"other-{OWNER}"
    other.write_bytes(b"of another program")
    assert shared_memory.sweep() >= 1
    assert left_of(OWNER) == [names[0]]
    assert other.exists()
    other.unlink()
    mine.close()


def test_a_folder_of_such_a_name_is_no_segment_and_is_left_alone(names):
    folder = shared_memory.FOLDER / names[0]
    folder.mkdir()
    shared_memory.sweep()
    assert folder.exists()
    folder.rmdir()


def test_a_sweep_for_which_there_are_no_descriptors_says_so_and_the_next_one_finds_all(names):
    (shared_memory.FOLDER / names[0]).write_bytes(b"left by a dead process")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            shared_memory.sweep()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    shared_memory.sweep()
    assert left_of(OWNER) == []


def test_a_segment_that_cannot_be_removed_is_left_to_a_sweep(names, caplog):
    segment = shared_memory.create(names[0], b"0123456789")
    # The system refuses to unlink a folder.
    (shared_memory.FOLDER / names[0]).rename(shared_memory.FOLDER / names[1])
    (shared_memory.FOLDER / names[0]).mkdir()
    try:
        segment.close()
        assert [record.message for record in caplog.records] == ["shared-memory segment not removed"]
    finally:
        (shared_memory.FOLDER / names[0]).rmdir()
    shared_memory.sweep()
    assert left_of(OWNER) == []


def test_fifty_senders_killed_at_random_points_leave_no_segment():
    choose, owner = random.Random(6), f"{OWNER}-killed"
    num_left = 0
    for _ in range(50):
        with running(sys.executable, "-c", SENDER, owner, stdout=subprocess.PIPE) as sender:
            assert sender.stdout is not None
            for _ in range(choose.randint(1, 6)):
                assert sender.stdout.readline()
            sender.send_signal(signal.SIGKILL)
        num_left += len(left_of(owner))
        shared_memory.sweep()
        assert left_of(owner) == []
    # The kills struck where there was something to leave.
    assert num_left >= 50
