"""Stop strings: which one, where the text is cut, and what is never shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend_svc.text.stop_strings import StopBuffer, StopHit, find_stop


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


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.text(alphabet="abc", max_size=40),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(st.integers(1, 6), min_size=1, max_size=8),
    st.booleans(),
)
def test_chunking_never_changes_what_is_shown(text, stops, sizes, include):
    whole = find_stop(text, len(text), stops, include=include)
    expected = text if whole is None else text[: whole.num_kept_chars]

    buffer, shown, at, turn, stop = StopBuffer(stops, include=include), "", 0, 0, None
    while at < len(text) and stop is None:
        size = sizes[turn % len(sizes)]
        piece, stop = buffer.push(text[at : at + size], len(text[at : at + size]))
        shown, at, turn = shown + piece, at + size, turn + 1
        assert expected.startswith(shown)
    if stop is None:
        shown += buffer.flush()

    assert shown == expected
    assert stop == (None if whole is None else whole.stop)
