"""Block hashes: canonical bytes, one root for the fleet, a chain from the first token on."""

from __future__ import annotations

import hashlib
import struct

import pytest

from engine_svc.cache.block_hash import BlockHasher, span_keys
from engine_svc.core.request import ContentSpan, Request
from tests.engine_svc.cache.fakes import request, tokens


def _hashes(hashed: Request, *, fingerprint: bytes = b"model", block_size: int = 16) -> list[bytes]:
    BlockHasher(block_size, fingerprint).extend(hashed)
    return hashed.block_hashes


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (33, 2)])
def test_only_full_blocks_are_hashed(num_tokens: int, num_hashes: int):
    assert len(_hashes(request("a", tokens(num_tokens)))) == num_hashes


def test_51_a_hash_is_the_sha256_of_the_one_before_and_little_endian_tokens():
    root = BlockHasher(16, b"model").root()
    first = hashlib.sha256(root + struct.pack("<16I", *range(16))).digest()
    second = hashlib.sha256(first + struct.pack("<16I", *range(16, 32))).digest()
    assert _hashes(request("a", tokens(32))) == [first, second]


def test_51_the_root_is_the_sha256_of_the_parts_with_their_lengths():
    parts = [b"triptych.block.v1", b"model", b"tenant", b"adapter", "ä".encode()]
    expected = hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()
    assert BlockHasher(16, b"model").root("tenant", ("adapter", "ä")) == expected


def test_51_the_hashes_are_the_same_in_every_process_on_every_machine_for_ever():
    # Fixed digests: events, transfers and routing between engines of different age depend on them.
    hasher = BlockHasher(4, b"model")
    assert hasher.root().hex() == "070dee1cef38c2f375d68fc88cc5bdee45d1ab9996e00a54fa6d7a16b9c99e35"
    assert hasher.root("tenant").hex() == "8fe8a3f15afb3b5189ebe1e368edf8ed73eed0db070f05dbdb4a243aa3c93b08"
    assert (
        hasher.root("tenant", ("adapter",)).hex()
        == "1d727ed73fbb17157b72b35588c1a9c11600274c7111c49c5a2d8460d1f60e03"
    )
    plain = request("a", [0, 1, 255, 256, 65536, 2**32 - 1, 7, 8, 9])
    assert [block_hash.hex() for block_hash in _hashes(plain, block_size=4)] == [
        "4d6d950b0700213fd939e95fead4f49eec99579878e5a364c28fce64a2c54204",
        "4905e43b72cb5ea20910817c73826510d48289e5a0b272b1feab04f09bc9f59b",
    ]
    full = request(
        "b", tokens(8), salt="tenant", extra_keys=("adapter",), spans=(ContentSpan(2, 4, "image"),)
    )
    assert [block_hash.hex() for block_hash in _hashes(full, block_size=4)] == [
        "0b637d444a3faf1ed38c28e232af2a9e5de0af639b6a336533584163e540b13b",
        "41133ab12eaa1b03f232b840ec541c5ede7a110b370721bb3376431deaf326d3",
    ]


def test_51_two_engines_with_the_same_fingerprint_agree_and_others_share_nothing():
    here, there = _hashes(request("a", tokens(64))), _hashes(request("b", tokens(64)))
    assert here == there
    assert len(set(here)) == 4
    assert set(here).isdisjoint(_hashes(request("c", tokens(64)), fingerprint=b"other"))


# Everything that a hash depends on besides the tokens, changed one at a time.
_VARIANTS: dict[str, Request] = {
    "nothing": request("a", tokens(48)),
    "salt": request("b", tokens(48), salt="key"),
    "extra key": request("c", tokens(48), extra_keys=("key",)),
    "two extra keys": request("d", tokens(48), extra_keys=("key", "key")),
    "salt and extra key": request("e", tokens(48), salt="key", extra_keys=("key",)),
    "joined extra keys": request("f", tokens(48), extra_keys=("keykey",)),
    "empty extra key": request("g", tokens(48), extra_keys=("",)),
    "span": request("h", tokens(48), spans=(ContentSpan(0, 4, "key"),)),
    "later span": request("i", tokens(48), spans=(ContentSpan(1, 4, "key"),)),
    "other span": request("j", tokens(48), spans=(ContentSpan(0, 4, "yek"),)),
    "two spans": request("k", tokens(48), spans=(ContentSpan(0, 4, "key"), ContentSpan(0, 4, "key"))),
    "span with salt": request("l", tokens(48), salt="key", spans=(ContentSpan(0, 4, "key"),)),
    "first token": request("m", [99, *tokens(47, 1)]),
    "last token of the block": request("n", [*tokens(15), 99, *tokens(32, 16)]),
}


def test_50_whatever_differs_changes_every_hash_and_nothing_is_taken_for_another():
    # The salt and the keys are in the root, so the whole chain differs, not the first block alone.
    hashes = [block_hash for variant in _VARIANTS.values() for block_hash in _hashes(variant)]
    assert len(set(hashes)) == len(hashes) == 3 * 14


def test_50_the_order_of_keys_matters():
    hasher = BlockHasher(16)
    assert hasher.root("", ("a", "b")) != hasher.root("", ("b", "a"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((b"ab", "c", ()), (b"a", "bc", ())),
        ((b"model", "ab", ("c",)), (b"model", "a", ("bc",))),
        ((b"model", "", ("ab", "c")), (b"model", "", ("a", "bc"))),
        ((b"model", "", ("key",)), (b"model", "key", ())),
        ((b"model", "", ("",)), (b"model", "", ())),
    ],
)
def test_50_no_part_of_the_root_can_borrow_from_its_neighbour(one, other):
    roots = [BlockHasher(16, fingerprint).root(salt, keys) for fingerprint, salt, keys in (one, other)]
    assert roots[0] != roots[1]


def test_50_a_span_changes_the_hashes_from_its_first_block_on():
    plain = _hashes(request("a", tokens(64)))
    spanned = _hashes(request("b", tokens(64), spans=(ContentSpan(20, 8, "image"),)))
    assert spanned[0] == plain[0]
    assert set(spanned[1:]).isdisjoint(plain)


def test_50_the_keys_of_spans_stand_behind_the_tokens_with_length_and_place():
    spans = (ContentSpan(1, 4, "aaa"), ContentSpan(6, 4, "b"))
    root = BlockHasher(4, b"model").root()
    first = hashlib.sha256(root + struct.pack("<4I", 0, 1, 2, 3) + struct.pack("<Qq", 3, 1) + b"aaa").digest()
    keys = struct.pack("<Qq", 3, -3) + b"aaa" + struct.pack("<Qq", 1, 2) + b"b"
    second = hashlib.sha256(first + struct.pack("<4I", 4, 5, 6, 7) + keys).digest()
    assert _hashes(request("a", tokens(8), spans=spans), block_size=4) == [first, second]


def test_a_hash_depends_on_every_token_before_it():
    reference = _hashes(request("a", tokens(48)))
    for place in (0, 15, 16, 47):
        changed = request("b", [*tokens(place), 999, *tokens(47 - place, place + 1)])
        num_equal = place // 16
        assert _hashes(changed)[:num_equal] == reference[:num_equal]
        assert set(changed.block_hashes[num_equal:]).isdisjoint(reference)


def test_hashes_grow_with_the_tokens():
    hasher = BlockHasher(16, b"model")
    growing = request("a", tokens(20))
    hasher.extend(growing)
    growing.token_ids.extend(tokens(20, 20))
    hasher.extend(growing)
    hasher.extend(growing)
    assert growing.block_hashes == _hashes(request("b", tokens(40)))


def test_what_is_hashed_already_is_not_hashed_again():
    hasher = BlockHasher(4)
    growing = request("a", tokens(8), salt="first")
    growing.block_hashes = [b"known"]
    hasher.extend(growing)
    assert growing.block_hashes == [
        b"known",
        hashlib.sha256(b"known" + struct.pack("<4I", 4, 5, 6, 7)).digest(),
    ]


def test_the_smallest_block_has_one_token():
    assert len(_hashes(request("a", tokens(3)), block_size=1)) == 3
    with pytest.raises(ValueError, match="block_size is 0, must be at least 1"):
        BlockHasher(0)


# Which keys a block has of the spans that reach into it, and where each begins.

TWO_SPANS = (ContentSpan(11, 10, "aaa"), ContentSpan(30, 10, "bbb"))


@pytest.mark.parametrize(
    ("start", "keys"),
    [(0, [("aaa", 11)]), (16, [("aaa", -5), ("bbb", 14)]), (32, [("bbb", -2)]), (48, [])],
)
def test_49_a_block_has_the_keys_of_its_spans_with_their_beginnings(start: int, keys: list[tuple[str, int]]):
    assert span_keys(TWO_SPANS, start, start + 16) == keys


@pytest.mark.parametrize(
    ("start", "num_tokens", "reaches"),
    [
        (15, 1, False),
        (15, 2, True),
        (16, 1, True),
        (31, 1, True),
        (32, 1, False),
        (0, 16, False),
        (0, 17, True),
    ],
)
def test_a_span_belongs_to_a_block_from_its_first_token_in_it_to_its_last(start, num_tokens, reaches):
    expected = [("key", start - 16)] if reaches else []
    assert span_keys([ContentSpan(start, num_tokens, "key")], 16, 32) == expected
