"""What is read from a model's files."""

from __future__ import annotations

import json

import pytest

from frontend_svc.text.model import GenerationDefaults, read_eos_token_ids, read_generation_defaults


def test_no_file_is_no_defaults():
    assert read_generation_defaults(b"") == GenerationDefaults()


def test_defaults_of_the_models_authors():
    content = json.dumps({"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 128}).encode()
    assert read_generation_defaults(content) == GenerationDefaults(0.6, 0.9, 20, 128)


def test_models_that_do_not_sample_are_greedy():
    assert read_generation_defaults(b'{"do_sample": false, "temperature": 0.7}').temperature == 0.0


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff"])
def test_broken_files_are_a_value_error(content):
    with pytest.raises(ValueError):
        read_generation_defaults(content)


def test_null_and_foreign_values_are_no_defaults():
    assert (
        read_generation_defaults(b'{"temperature": null, "top_k": "x", "top_p": true}')
        == GenerationDefaults()
    )


def test_eos_ids_main_one_first():
    assert read_eos_token_ids(b'{"eos_token_id": [5, 3, 5]}', b'{"eos_token_id": 9}') == (5, 3)
    assert read_eos_token_ids(b"", b'{"eos_token_id": 9}') == (9,)
    assert read_eos_token_ids(b"{}", b'{"eos_token_id": null}') == ()
