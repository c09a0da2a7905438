"""Block hashes: canonical bytes, one root for the fleet, a chain from the first token on."""

from __future__ import annotations

import hashlib
import struct

import pytest

from engine_svc.cache.block_hash import BlockHasher
from tests.engine_svc.cache.fakes import request, tokens


def _hashes(num_tokens: int, *, fingerprint: bytes = b"model", salt: str = "", first: int = 0) -> list[bytes]:
    hashed = request("a", tokens(num_tokens, first), salt=salt)
    BlockHasher(16, fingerprint).extend(hashed)
    return hashed.block_hashes


def test_only_full_blocks_are_hashed():
    assert len(_hashes(15)) == 0
    assert len(_hashes(33)) == 2


def test_a_hash_is_the_sha256_of_the_one_before_and_little_endian_tokens():
    root = BlockHasher(16, b"model").root()
    first = hashlib.sha256(root + struct.pack("<16I", *range(16))).digest()
    second = hashlib.sha256(first + struct.pack("<16I", *range(16, 32))).digest()
    assert _hashes(32) == [first, second]


def test_equal_prompts_have_equal_hashes_in_every_engine():
    # A fixed digest: it must be the same in another process, on another machine, next year.
    digest = BlockHasher(16, b"model").root("tenant").hex()
    assert digest == "8fe8a3f15afb3b5189ebe1e368edf8ed73eed0db070f05dbdb4a243aa3c93b08"
    assert _hashes(64) == _hashes(64)


def test_other_models_and_other_salts_share_nothing():
    reference = _hashes(48)
    for other in (_hashes(48, fingerprint=b"other"), _hashes(48, salt="tenant")):
        assert set(other).isdisjoint(reference)


def test_the_salt_cannot_be_taken_for_a_part_of_the_fingerprint():
    assert BlockHasher(16, b"ab").root("c") != BlockHasher(16, b"a").root("bc")


def test_a_hash_depends_on_every_token_before_it():
    changed = request("a", [999, *tokens(47, 1)])
    BlockHasher(16, b"model").extend(changed)
    assert set(changed.block_hashes).isdisjoint(_hashes(48))


def test_hashes_grow_with_the_tokens():
    hasher = BlockHasher(16, b"model")
    growing = request("a", tokens(20))
    hasher.extend(growing)
    growing.token_ids.extend(tokens(20, 20))
    hasher.extend(growing)
    hasher.extend(growing)
    assert growing.block_hashes == _hashes(40)


def test_a_block_has_at_least_one_token():
    with pytest.raises(ValueError, match="block_size is 0"):
        BlockHasher(0)
