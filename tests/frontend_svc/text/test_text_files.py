"""The key of a model's files."""

from __future__ import annotations

from frontend_svc.text.text_files import TextFiles


def test_the_key_is_of_all_files_and_of_their_borders():
    given = [
        TextFiles(b"ab", b"c", b""),
        TextFiles(b"a", b"bc", b""),
        TextFiles(b"abc"),
        TextFiles(b"", b"", b"abc"),
    ]
    assert len({files.key for files in given}) == len(given)
    assert TextFiles(b"ab", b"c").key == given[0].key
