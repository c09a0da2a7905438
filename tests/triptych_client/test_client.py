"""The blocking client against a scripted frontend."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from tests.triptych_client.fakes import ENDS_BADLY, REFUSED, STREAM_FOREVER, FakeFrontend, serve
from triptych_client.client import Client
from triptych_client.errors import FieldViolation, TriptychError
from triptych_client.events import Delta, Finished, Started, Usage
from triptych_client.retry import RetryPolicy


@pytest.fixture
def frontend() -> FakeFrontend:
    return FakeFrontend()


@pytest.fixture
def client(frontend: FakeFrontend) -> Iterator[Client]:
    with serve(frontend) as address, Client(address) as client:
        yield client


def test_a_stream_is_started_deltas_and_finished(client: Client) -> None:
    events = list(client.generate("two words", request_id="mine", stop=["."]))
    assert events == [
        Started("mine", "tiny", 7, 3, ()),
        Delta(0, "two", (0,), None),
        Delta(0, "words", (1,), None),
        Delta(1, "other", (), None),
        Finished(0, "stop", ".", Usage(7, 3, 2)),
    ]


def test_text_deltas_are_those_of_one_output(client: Client) -> None:
    assert list(client.generate("two words").text_deltas()) == ["two", "words"]
    assert list(client.generate("two words").text_deltas(output_index=1)) == ["other"]


def test_a_unary_answer_is_a_completion(client: Client) -> None:
    completion = client.generate_unary("two words")
    assert completion.text == "two words"
    assert completion.started.request_id == "made-here"
    assert completion.outputs[0].token_ids == (0, 1)
    assert completion.outputs[0].reason == "length"
    assert completion.outputs[0].stop_match is None
    assert completion.usage == Usage(7, 3, 2)


def test_leaving_the_block_cancels_the_request(client: Client, frontend: FakeFrontend) -> None:
    with client.generate(STREAM_FOREVER) as stream:
        assert isinstance(next(stream), Started)
        assert isinstance(next(stream), Delta)
    assert frontend.cancelled.wait(timeout=10)
    assert list(stream) == []


def test_a_stream_that_is_left_is_aborted_with_the_metadata_of_its_call(
    client: Client, frontend: FakeFrontend
) -> None:
    with client.generate(STREAM_FOREVER, orphan_grace_ms=1000, metadata={"x-request-id": "mine"}) as stream:
        next(stream)
    assert [metadata["x-request-id"] for metadata in frontend.metadata] == ["mine", "mine"]


def test_closing_wakes_a_reader_without_an_error(client: Client, frontend: FakeFrontend) -> None:
    stream = client.generate(STREAM_FOREVER)
    texts: list[str] = []
    has_text = threading.Event()

    def read() -> None:
        for text in stream.text_deltas():
            texts.append(text)
            has_text.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert has_text.wait(timeout=10)
    stream.close()
    reader.join(timeout=10)
    assert not reader.is_alive()
    assert texts == ["a"]
    assert frontend.cancelled.wait(timeout=10)


def test_closing_a_stream_that_has_ended_does_nothing(client: Client) -> None:
    stream = client.generate("word")
    assert len(list(stream)) == 4
    stream.close()
    assert list(stream) == []


def test_a_refusal_keeps_its_details(client: Client) -> None:
    with pytest.raises(TriptychError) as caught:
        list(client.generate(REFUSED))
    assert caught.value.status is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message == "one field is wrong"
    assert caught.value.reason == "BAD_FIELD"
    assert caught.value.retry_after_ms == 250
    violation = FieldViolation("sampling.temperature", "temperature is nan, the limit is 0 to 2")
    assert caught.value.field_violations == (violation,)
    assert (caught.value.request_id, caught.value.trace_id) == ("the-call", "the-trace")
    assert str(caught.value) == "INVALID_ARGUMENT: one field is wrong"


def test_a_unary_refusal_is_the_same_error(client: Client) -> None:
    with pytest.raises(TriptychError, match="one field is wrong") as caught:
        client.generate_unary(REFUSED)
    assert len(caught.value.field_violations) == 1


def test_the_deadline_is_an_error_and_reaches_the_server(client: Client, frontend: FakeFrontend) -> None:
    # The deadline is the stream's, not that of the first connection.
    client.connect()
    with pytest.raises(TriptychError) as caught:
        list(client.generate(STREAM_FOREVER, timeout_s=1.0))
    assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.field_violations == ()
    assert frontend.cancelled.wait(timeout=10)


def test_metadata_goes_along(client: Client, frontend: FakeFrontend) -> None:
    client.generate_unary("word", metadata={"x-request-id": "abc"})
    assert frontend.metadata[0]["x-request-id"] == "abc"


def test_unavailable_is_tried_again_before_the_first_answer(client: Client, frontend: FakeFrontend) -> None:
    frontend.num_failures_left = 1
    assert list(client.generate("word").text_deltas()) == ["word"]
    assert len(frontend.requests) == 2


def test_a_full_frontend_that_says_when_is_asked_again(client: Client, frontend: FakeFrontend) -> None:
    frontend.num_failures_left, frontend.retry_after_ms = 2, 20
    assert list(client.generate("word").text_deltas()) == ["word"]
    assert len(frontend.requests) == 3


def test_nothing_is_tried_again_past_the_deadline(client: Client, frontend: FakeFrontend) -> None:
    # Less than the longest wait of the policy, more than the call has. It waits for neither.
    frontend.num_failures_left, frontend.retry_after_ms = 1, 20_000
    with pytest.raises(TriptychError, match="RESOURCE_EXHAUSTED: full") as caught:
        client.generate_unary("word", timeout_s=15.0)
    assert caught.value.retry_after_ms == 20_000
    assert len(frontend.requests) == 1


def test_nothing_is_tried_again_after_the_first_message(client: Client, frontend: FakeFrontend) -> None:
    with pytest.raises(TriptychError, match="the engine is gone"):
        list(client.generate(ENDS_BADLY))
    assert len(frontend.requests) == 1


def test_attempts_are_bounded(client: Client, frontend: FakeFrontend) -> None:
    frontend.num_failures_left = 9
    with pytest.raises(TriptychError, match="no engine yet"):
        client.generate_unary("word")
    assert len(frontend.requests) == 3


def test_closing_ends_the_wait_for_the_next_attempt(frontend: FakeFrontend) -> None:
    frontend.num_failures_left = 9
    policy = RetryPolicy(first_backoff_s=600, max_backoff_s=600)
    with serve(frontend) as address, Client(address, retry=policy) as client:
        stream = client.generate("word")
        reader = threading.Thread(target=lambda: list(stream))
        reader.start()
        stream.close()
        reader.join(timeout=10)
        assert not reader.is_alive()
    assert len(frontend.requests) <= 1


def test_other_calls_are_tried_again(client: Client, frontend: FakeFrontend) -> None:
    frontend.num_failures_left = 2
    assert client.tokenize("ab") == [0, 97, 98]
    assert frontend.num_failures_left == 0


def test_one_attempt_means_no_retry() -> None:
    frontend = FakeFrontend(num_failures_left=1)
    with (
        serve(frontend) as address,
        Client(address, retry=RetryPolicy(max_attempts=1)) as client,
        pytest.raises(TriptychError, match="no engine yet"),
    ):
        client.generate_unary("word")
    assert len(frontend.requests) == 1


def test_tokens_and_back(client: Client) -> None:
    assert client.tokenize("ab") == [0, 97, 98]
    assert client.tokenize("ab", add_special_tokens=False) == [97, 98]
    assert client.detokenize([97, 98]) == "ab"


def test_models_and_server_info(client: Client) -> None:
    assert [model.name for model in client.list_models()] == ["tiny"]
    assert client.server_info().version == "1.2.3"


def test_ready_is_what_health_says() -> None:
    with serve(FakeFrontend(), ready=True) as address, Client(f"grpc://{address}") as client:
        assert client.is_ready()
    with serve(FakeFrontend(), ready=False) as address, Client(address) as client:
        assert not client.is_ready()


def test_no_server_is_not_ready() -> None:
    with serve(FakeFrontend()) as address:
        pass
    with Client(address) as client:
        assert not client.is_ready(timeout_s=5)
        with pytest.raises(TriptychError, match=f"UNAVAILABLE: {address} was not reached within 0.2 s"):
            client.connect(timeout_s=0.2)


def test_connect_returns_once_the_frontend_is_reached(client: Client) -> None:
    client.connect()
