"""Streamed text equals one-shot decode, whatever the ids."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from frontend_svc.text.detokenizer import Detokenizer
from frontend_svc.text.stop_strings import StopBuffer, StopHit, find_stop
from tests.frontend_svc.tokenizers import (
    EOS,
    SAMPLES,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    id_of,
    word_piece_tokenizer,
)

BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()


def detokenizer(tokenizer: Tokenizer, prompt: list[int], *, skip: bool = True) -> Detokenizer:
    special = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    return Detokenizer(tokenizer, prompt, special_ids=special, skip_special_tokens=skip)


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int], *, skip: bool = True) -> list[str]:
    stream = detokenizer(tokenizer, prompt, skip=skip)
    return [*(stream.feed(token_id) for token_id in ids), stream.flush()]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=80),
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=6),
    st.booleans(),
)
def test_any_byte_level_ids_stream_to_their_one_shot_decode(ids, prompt, skip):
    text = "".join(streamed(BYTE_LEVEL, prompt, ids, skip=skip))

    # A prompt that ends in half a character leaves the other half to the output.
    if not BYTE_LEVEL.decode(prompt, skip_special_tokens=skip).endswith("\ufffd"):
        assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=60))
def test_any_unicode_text_comes_back(text):
    assert "".join(streamed(BYTE_LEVEL, [], BYTE_LEVEL.encode(text).ids)) == text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.text(alphabet="abc日é 😀한ж", min_size=1, max_size=40),
    st.text(alphabet="abc日 ", min_size=1, max_size=8),
)
def test_byte_fallback_text_continues_its_prompt(output, prompt):
    prompt_ids = [1, *BYTE_FALLBACK.encode(prompt).ids]
    all_ids = BYTE_FALLBACK.encode(prompt + output).ids
    # Only where the output's tokens are a true continuation of the prompt's.
    if all_ids[: len(prompt_ids) - 1] == prompt_ids[1:]:
        text = "".join(streamed(BYTE_FALLBACK, prompt_ids, all_ids[len(prompt_ids) - 1 :]))
        assert BYTE_FALLBACK.decode(prompt_ids) + text == BYTE_FALLBACK.decode(all_ids)


def test_byte_fallback_garbage_neither_raises_nor_loses_what_follows():
    rng = random.Random(7)
    for _ in range(300):
        ids = [rng.randrange(BYTE_FALLBACK.get_vocab_size()) for _ in range(30)]
        text = "".join(streamed(BYTE_FALLBACK, [], [*ids, BYTE_FALLBACK.token_to_id("▁a")]))
        assert text.endswith(" a")


def test_leading_space_is_kept_after_a_prompt_and_stripped_at_its_start():
    mark_a = BYTE_FALLBACK.token_to_id("▁a")
    assert "".join(streamed(BYTE_FALLBACK, [1, mark_a], [mark_a])) == " a"
    assert "".join(streamed(BYTE_FALLBACK, [1], [mark_a])) == "a"


def test_a_prompt_that_ends_in_half_a_character_is_never_repeated():
    prompt = [*BYTE_LEVEL.encode("the cat ").ids, BYTE_LEVEL.token_to_id("æ")]
    assert "cat" not in "".join(streamed(BYTE_LEVEL, prompt, BYTE_LEVEL.encode("dog").ids))


def test_half_a_character_is_held_until_it_is_whole():
    ids = [BYTE_LEVEL.token_to_id(byte) for byte in ("æ", "Ĺ", "¥")]
    assert streamed(BYTE_LEVEL, [], ids) == ["", "", "日", ""]


def test_incomplete_bytes_at_the_end_are_flushed_as_replacement_character():
    ids = [BYTE_LEVEL.token_to_id(byte) for byte in ("æ", "Ĺ")]
    assert streamed(BYTE_LEVEL, [], ids) == ["", "", "\ufffd"]
    assert BYTE_LEVEL.decode(ids) == "\ufffd"


def test_a_second_flush_returns_nothing():
    stream = detokenizer(BYTE_LEVEL, [])
    stream.feed(BYTE_LEVEL.token_to_id("æ"))
    assert (stream.flush(), stream.flush()) == ("\ufffd", "")


@pytest.mark.parametrize("sample", SAMPLES)
def test_samples_stream_with_little_delay(sample):
    ids = BYTE_LEVEL.encode(sample).ids
    pieces = streamed(BYTE_LEVEL, [], ids)
    assert "".join(pieces) == sample
    assert pieces[-1] == ""


def test_endless_invalid_bytes_cost_the_same_each_and_come_out():
    stream = detokenizer(BYTE_LEVEL, [])
    continuation_byte = BYTE_LEVEL.token_to_id("Ģ")
    started_at = time.perf_counter()
    text = "".join([stream.feed(continuation_byte) for _ in range(5_000)])
    # Quadratic cost would take minutes; the bound is generous for a busy machine.
    assert time.perf_counter() - started_at < 10
    assert len(text + stream.flush()) == 5_000


def test_special_tokens_are_skipped_or_shown():
    end = BYTE_LEVEL.token_to_id("<|end|>")
    ids = [*BYTE_LEVEL.encode("cat").ids, end]
    assert "".join(streamed(BYTE_LEVEL, [], ids)) == "cat"
    assert "".join(streamed(BYTE_LEVEL, [], ids, skip=False)) == "cat<|end|>"


def test_ids_without_text_are_ignored():
    assert "".join(streamed(BYTE_LEVEL, [], [100_000, *BYTE_LEVEL.encode("cat").ids])) == "cat"


def test_special_tokens_beside_each_other_are_joined_on_request():
    tokenizer = word_piece_tokenizer()
    end, cat = id_of(tokenizer, EOS), tokenizer.encode("cat").ids
    special = frozenset({end})
    for joined, text in ((frozenset(), f"{EOS} {EOS} cat {EOS}"), (special, f"{EOS}{EOS} cat {EOS}")):
        stream = Detokenizer(tokenizer, [], special_ids=special, skip_special_tokens=False, joined_ids=joined)
        assert "".join(map(stream.feed, [end, end, *cat, end])) + stream.flush() == text


def test_markers_are_shown_where_other_special_tokens_are_left_out():
    end, pad = id_of(BYTE_LEVEL, EOS), id_of(BYTE_LEVEL, "<|pad|>")
    stream = Detokenizer(
        BYTE_LEVEL,
        [pad, end],
        special_ids=frozenset({end, pad}),
        skip_special_tokens=True,
        marker_ids=frozenset({pad}),
    )
    ids = [end, pad, *BYTE_LEVEL.encode("a").ids, end]
    assert "".join(map(stream.feed, ids)) + stream.flush() == "<|pad|>a"


# Stop strings: which one, where the text is cut, and what is never shown.


@pytest.mark.parametrize("stops", [["a", "is"], ["is", "a"]])
@pytest.mark.parametrize(("include", "num_kept"), [(False, 10), (True, 12)])
def test_the_stop_that_completes_first_wins_whatever_the_list_order(stops, include, num_kept):
    assert find_stop("0123456789is a", 4, stops, include=include) == StopHit("is", num_kept)


def test_a_short_stop_inside_a_long_one_completes_first():
    assert find_stop("abc", 3, ["abc", "b"], include=False) == StopHit("b", 1)


@pytest.mark.parametrize("stops", [["bc", "abc"], ["abc", "bc"]])
def test_ties_go_by_list_order(stops):
    hit = find_stop("abc", 3, stops, include=False)
    assert hit is not None and hit.stop == stops[0]


def test_a_match_at_the_very_end_with_include_cuts_nothing():
    assert find_stop("xis", 2, ["is"], include=True) == StopHit("is", 3)


def test_no_new_text_or_no_stops_is_no_match():
    assert find_stop("is", 0, ["is"], include=False) is None
    assert find_stop("is", 2, [], include=False) is None


def test_a_match_may_begin_in_old_text_but_must_end_in_new():
    assert find_stop("i" + "s", 1, ["is"], include=False) == StopHit("is", 0)
    assert find_stop("is" + "x", 1, ["is"], include=False) is None


def test_stop_in_the_middle_of_tokens_cuts_the_text():
    for include, expected in ((False, "or"), (True, "organi")):
        buffer = StopBuffer(["gani"], include=include)
        shown = ""
        stop = None
        for piece in ("or", "gan", "ization"):
            text, stop = buffer.push(piece, len(piece))
            shown += text
            if stop:
                break
        assert (shown, stop) == (expected, "gani")


def test_nothing_of_a_possible_stop_is_shown_until_it_is_none():
    buffer = StopBuffer(["END."], include=False)
    assert buffer.push("textEND", 7) == ("text", None)
    assert buffer.push("S", 1) == ("E", None)
    assert buffer.flush() == "NDS"


def test_unscanned_text_cannot_complete_a_stop():
    buffer = StopBuffer(["e"], include=False)
    assert buffer.push(" is Lee", 0) == (" is Lee", None)
    assert buffer.push(", he", 4) == (", h", "e")
