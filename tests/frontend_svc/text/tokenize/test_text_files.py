"""The key of a model's files."""

from __future__ import annotations

import hashlib

from frontend_svc.text.tokenize.text_files import TextFiles


def test_the_key_is_of_all_files_and_of_their_borders():
    given = [
        TextFiles(b"ab", b"c", b""),
        TextFiles(b"a", b"bc", b""),
        TextFiles(b"abc"),
        TextFiles(b"", b"", b"abc"),
    ]
    assert len({files.key for files in given}) == len(given)
    assert TextFiles(b"ab", b"c").key == given[0].key


def test_each_file_has_its_own_digest_by_its_name():
    files = TextFiles(b"a", chat_template=b"b")
    assert files.digests == {
        "tokenizer.json": hashlib.sha256(b"a").hexdigest(),
        "chat_template.jinja": hashlib.sha256(b"b").hexdigest(),
    }
