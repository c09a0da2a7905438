"""What is kept of responses, and what it counts for."""

from __future__ import annotations

import pytest

from frontend_svc.protocols.openai.bodies import Message
from frontend_svc.protocols.openai.response_store import ResponseStore, StoredResponse
from triptych_kit.errors import NotFound


def unlimited() -> ResponseStore:
    return ResponseStore(max_responses=100, max_bytes=1 << 20)


def response(text: str, previous: StoredResponse | None = None) -> StoredResponse:
    return StoredResponse({"text": text}, [Message("user", text)], previous)


SIZE = len(response("0").body) + response("0").num_message_bytes


def texts(stored: StoredResponse) -> list[object]:
    return [message.content for message in stored.conversation()]


def listed(store: ResponseStore, owner: str = "") -> list[str]:
    found = []
    for index in range(10):
        try:
            store.get(owner, str(index))
        except NotFound:
            continue
        found.append(str(index))
    return found


@pytest.mark.parametrize("limit", [{"max_responses": 3}, {"max_bytes": 3 * SIZE + 1}])
def test_the_oldest_are_removed_beyond_a_limit(limit):
    store = ResponseStore(**{"max_responses": 100, "max_bytes": 1 << 20, **limit})
    for index in range(5):
        store.add("", str(index), response(str(index)))
    assert (listed(store), len(store), store.num_bytes) == (["2", "3", "4"], 3, 3 * SIZE)


@pytest.mark.parametrize("limit", [{"max_responses": 4}, {"max_bytes": 4 * SIZE}])
def test_who_has_most_loses_its_oldest_and_others_keep_theirs(limit):
    store = ResponseStore(**{"max_responses": 100, "max_bytes": 1 << 20, **limit})
    store.add("few", "0", response("0"))
    for index in range(9):
        store.add("many", str(index), response(str(index)))
    assert (listed(store, "few"), listed(store, "many")) == (["0"], ["6", "7", "8"])
    assert store.num_bytes == 4 * SIZE


def test_what_does_not_fit_alone_is_not_kept_and_removes_nothing():
    store = ResponseStore(max_responses=100, max_bytes=2 * SIZE)
    store.add("", "0", response("0"))
    store.add("", "1", response("x" * 2 * SIZE))
    assert (listed(store), store.num_bytes) == (["0"], SIZE)


def test_turns_that_are_continued_stay_in_the_conversation_and_count():
    store = unlimited()
    first = response("0")
    second = response("1", first)
    store.add("", "0", first)
    store.add("", "1", second)
    store.delete("", "0")
    assert texts(second) == ["0", "1"]
    assert first.body == b""
    assert store.num_bytes == SIZE + first.num_message_bytes
    store.delete("", "1")
    assert store.num_bytes == 0


def test_a_turn_that_was_removed_while_it_was_continued_counts_again():
    store = unlimited()
    first = response("0")
    second = response("1", first)
    for name, each in (("0", first), ("1", second)):
        store.add("", name, each)
    for name in ("0", "1"):
        store.delete("", name)
    assert store.num_bytes == 0
    third = response("2", second)
    store.add("", "2", third)
    fourth = response("3", second)
    store.add("", "3", fourth)
    assert (texts(third), texts(fourth)) == (["0", "1", "2"], ["0", "1", "3"])
    assert store.num_bytes == 2 * SIZE + 2 * first.num_message_bytes
    store.delete("", "2")
    assert store.num_bytes == SIZE + 2 * first.num_message_bytes
    store.delete("", "3")
    assert store.num_bytes == 0


def test_a_conversation_that_does_not_fit_alone_is_not_kept_and_removes_nothing():
    num_turns = 4
    own = response("0").num_message_bytes
    store = ResponseStore(max_responses=100, max_bytes=SIZE + num_turns * own)
    turn = None
    for index in range(num_turns + 2):
        turn = response(str(index), turn)
        store.add("", str(index), turn)
        assert store.num_bytes <= SIZE + num_turns * own
    assert listed(store) == [str(num_turns)]
    assert store.num_bytes == SIZE + num_turns * own


def test_a_response_belongs_to_its_owner():
    store = unlimited()
    store.add("one", "0", response("0"))
    assert (listed(store, "one"), listed(store, "other")) == (["0"], [])
    with pytest.raises(NotFound) as caught:
        store.delete("other", "0")
    assert "response_id '0' is not known here" in caught.value.message
    assert caught.value.reason == "RESPONSE_NOT_FOUND"
