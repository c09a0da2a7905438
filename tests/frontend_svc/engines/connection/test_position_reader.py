"""A tensor over positions, from the steps of several engines to the end of an output."""

from __future__ import annotations

import pytest

from frontend_svc.engines.connection.columns import MalformedStep
from frontend_svc.engines.connection.position_reader import PositionReader
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import tensor_pb2
from triptych.engine.v1 import step_pb2

FP32 = tensor_pb2.D_TYPE_FP32


def part(first: int, num: int, size: int = 4) -> step_pb2.StepExtra:
    """Each position has `size` bytes, its number."""
    inline = b"".join(bytes([position]) * size for position in range(first, first + num))
    tensor = tensor_pb2.Tensor(dtype=FP32, shape=[num, size // 4], inline=inline)
    return step_pb2.StepExtra(row=0, first_position=first, hidden_states=tensor)


def read(*parts: step_pb2.StepExtra, num_output: int = 3) -> generate_pb2.ForwardOutputs:
    """Of a prompt of four tokens."""
    reader = PositionReader("hidden_states", 4)
    for each in parts:
        reader.read(each)
    finished = generate_pb2.Finished()
    reader.fill(finished, [0] * num_output)
    return finished.forward_outputs


def positions(outputs: generate_pb2.ForwardOutputs) -> list[int]:
    assert outputs.hidden_states.shape == [len(outputs.hidden_states.inline) // 4, 1]
    return list(outputs.hidden_states.inline[::4])


def test_parts_are_one_tensor_without_the_last_token_and_what_follows_a_stop_string():
    assert positions(read(part(0, 3), part(3, 1), part(4, 1), part(5, 1))) == [*range(6)]
    assert positions(read(part(0, 8))) == [*range(6)]
    assert positions(read(part(0, 2))) == [0, 1]


def test_positions_that_another_engine_computes_again_are_read_once():
    outputs = read(part(0, 4), part(4, 1), part(0, 3), part(3, 3))
    assert (outputs.first_position, positions(outputs)) == (0, [*range(6)])


def test_an_answer_that_another_frontend_continues_begins_where_that_has_read():
    outputs = read(part(2, 2), part(4, 2))
    assert (outputs.first_position, positions(outputs)) == (2, [2, 3, 4, 5])


def test_an_output_without_positions_has_no_tensor():
    assert not read().HasField("hidden_states")


@pytest.mark.parametrize(
    "broken",
    [
        step_pb2.StepExtra(hidden_states=tensor_pb2.Tensor(dtype=FP32, inline=b"abcd")),
        step_pb2.StepExtra(hidden_states=tensor_pb2.Tensor(dtype=FP32, shape=[3, 1], inline=b"abcd")),
        part(4, 1, size=8),
    ],
    ids=["no shape", "size", "another width"],
)
def test_parts_that_do_not_fit_together_are_malformed(broken):
    with pytest.raises(MalformedStep):
        read(part(0, 4), broken)
