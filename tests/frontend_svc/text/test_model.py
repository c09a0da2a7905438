"""What is read from a model's files."""

from __future__ import annotations

import hashlib
import json

import pytest

from frontend_svc.text.model import (
    GenerationDefaults,
    read_class_labels,
    read_eos_token_ids,
    read_generation_defaults,
)
from frontend_svc.text.tokenize.text_files import TextFiles


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


def test_penalties_and_min_p_are_defaults_as_well():
    content = {"min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    defaults = read_generation_defaults(json.dumps(content).encode())
    assert defaults == GenerationDefaults(**content)


@pytest.mark.parametrize(
    "content",
    [
        b'{"temperature": 5.0}',
        b'{"temperature": NaN}',
        b'{"top_p": 0.0}',
        b'{"top_k": -5}',
        b'{"top_k": Infinity}',
        b'{"min_p": 2}',
        b'{"repetition_penalty": 0}',
        b'{"repetition_penalty": 1e-4}',
        b'{"presence_penalty": 3}',
        b'{"max_new_tokens": 0}',
    ],
)
def test_a_default_that_no_engine_takes_is_not_applied_and_named(content, caplog):
    assert read_generation_defaults(content) == GenerationDefaults()
    (record,) = caplog.records
    assert (record.levelname, [record.keys]) == ("WARNING", list(json.loads(content)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("suppress_tokens", [7]),
        ("begin_suppress_tokens", [7]),
        ("bad_words_ids", [[7]]),
        ("sequence_bias", [[[7], -1.0]]),
        ("forced_bos_token_id", 7),
        ("stop_strings", ["x"]),
        ("num_beams", 4),
        ("max_length", 4096),
        ("min_new_tokens", 3),
        ("typical_p", 0.5),
        ("no_repeat_ngram_size", 3),
        ("early_stopping", True),
        ("a_key_of_next_year", {"x": 1}),
    ],
)
def test_a_key_without_effect_is_named(key, value, caplog):
    assert read_generation_defaults(json.dumps({key: value, "top_k": 5}).encode()).top_k == 5
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.keys == key
    assert record.getMessage() == "keys of generation_config.json have no effect"


def test_all_keys_without_effect_are_named_in_one_line(caplog):
    read_generation_defaults(b'{"suppress_tokens": [1], "temperature": 5, "typical_p": 0.5, "top_p": 0.5}')
    assert [record.keys for record in caplog.records] == ["suppress_tokens, temperature, typical_p"]


def test_keys_without_effect_are_named_once_however_many_engines_have_the_file(caplog):
    for _ in range(3):
        read_generation_defaults(b'{"epsilon_cutoff": 0.1}')
    assert [record.keys for record in caplog.records] == ["epsilon_cutoff"]


@pytest.mark.parametrize(
    "content",
    [
        b'{"typical_p": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": null}',
        b'{"suppress_tokens": [], "sequence_bias": {}, "early_stopping": false}',
        b'{"_from_model_config": true, "transformers_version": "5.0", "pad_token_id": 0, "bos_token_id": 1}',
        b'{"eos_token_id": [1, 2], "do_sample": true, "temperature": 0.6, "top_k": 0, "max_new_tokens": 9}',
    ],
)
def test_keys_that_change_nothing_or_have_their_effect_are_not_named(content, caplog):
    read_generation_defaults(content)
    assert not caplog.records


def test_classes_are_named_in_order_or_not_at_all():
    assert read_class_labels(b'{"id2label": {"1": "good", "0": "bad"}}') == ("bad", "good")
    assert read_class_labels(b'{"id2label": {"0": "bad", "2": "good"}}') == ()
    assert read_class_labels(b'{"id2label": 5}') == ()
    assert read_class_labels(b"") == ()


# The key of a model's files.


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
