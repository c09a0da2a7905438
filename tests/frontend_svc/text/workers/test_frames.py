"""Frames: whole whatever the pieces they come in, and refused when they are none."""

from __future__ import annotations

import random
import struct

import pytest

from frontend_svc.text.workers.frames import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    Frame,
    FrameError,
    FrameReader,
    pack_head,
    pack_numbers,
    unpack_numbers,
)


def read_all(reader: FrameReader) -> list[Frame]:
    frames = []
    while (frame := reader.take()) is not None:
        frames.append(frame)
    return frames


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_the_same_however_they_are_cut(seed):
    rng = random.Random(seed)
    sent = [Frame({"verb": "x", "number": index}, rng.randbytes(rng.randrange(3000))) for index in range(40)]
    stream = b"".join(pack_head(frame.header, len(frame.body)) + frame.body for frame in sent)
    reader, received = FrameReader(), []
    while stream:
        num_bytes = rng.choice((1, 3, 8, 100, 5000))
        reader.feed(stream[:num_bytes])
        stream = stream[num_bytes:]
        received += read_all(reader)
    assert received == sent


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<II", MAX_HEADER_BYTES + 1, 0),
        struct.pack("<II", 2, MAX_BODY_BYTES + 1),
        struct.pack("<II", 2, 0) + b"[]",
        struct.pack("<II", 1, 0) + b"{",
        struct.pack("<II", 2, 0) + b"\xff\xff",
    ],
    ids=["long header", "long body", "no object", "no JSON", "no text"],
)
def test_what_is_no_frame_is_refused(content):
    reader = FrameReader()
    reader.feed(content)
    with pytest.raises(FrameError):
        reader.take()


def test_nothing_is_sent_that_a_reader_would_refuse():
    with pytest.raises(FrameError):
        pack_head({}, MAX_BODY_BYTES + 1)


@pytest.mark.parametrize(
    "read",
    [
        lambda frame: frame.text("number"),
        lambda frame: frame.number("text"),
        lambda frame: frame.number("flag"),
        lambda frame: frame.number("missing"),
        lambda frame: frame.split(4),
        lambda frame: frame.split(-1),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(read):
    with pytest.raises(FrameError):
        read(Frame({"number": 1, "text": "x", "flag": True}, b"abc"))


def test_numbers_are_little_endian_and_four_bytes():
    assert pack_numbers([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert unpack_numbers(b"\x01\0\0\0\xff\xff\xff\xff") == [1, 2**32 - 1]
    with pytest.raises(FrameError):
        unpack_numbers(b"\0\0\0")
