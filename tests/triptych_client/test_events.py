"""Messages of the API become plain data."""

from __future__ import annotations

import pytest

from triptych.api.v1 import generate_pb2, inference_pb2
from triptych.common.v1 import output_pb2
from triptych_client.events import Finished, to_completion, to_event

REASONS = ("stop", "length", "abort", "error", "repetition")


def test_the_contract_has_no_further_reason() -> None:
    assert output_pb2.FinishReason.values() == list(range(len(REASONS) + 1))


@pytest.mark.parametrize("reason", REASONS)
def test_an_end_says_its_reason_in_a_word(reason: str) -> None:
    value = output_pb2.FinishReason.Value(f"FINISH_REASON_{reason.upper()}")
    event = to_event(generate_pb2.GenerateResponse(finished=generate_pb2.Finished(reason=value)))
    assert isinstance(event, Finished)
    assert (event.reason, event.stop_match) == (reason, None)
    answer = inference_pb2.GenerateUnaryResponse(outputs=[generate_pb2.Output(reason=value)])
    assert to_completion(answer).outputs[0].reason == reason
