"""Cases about the columns of steps. Their lengths and the order of records are checked in every case."""

from __future__ import annotations

import math
import struct

from triptych.common.v1 import output_pb2
from triptych.engine.v1 import step_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, expect
from triptych_conformance.engine_under_test import EngineUnderTest
from triptych_kit.errors import Unimplemented

CASES: Cases[EngineUnderTest] = Cases(Section.STEPS)


@CASES.must("Rows of one step are those of the session, each handle once, and step numbers do not decrease.")
async def rows_of_steps(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(*(engine.entry(handle) for handle in range(1, 5)))
    await stream.until_finished(*range(1, 5))
    numbers = [step.step_number for step in stream.record.steps]
    expect(numbers == sorted(numbers), "step numbers in order", numbers)
    reference = await engine.reference()
    for handle in range(1, 5):
        tokens = stream.record.tokens[handle]
        expect(tokens == reference, "the tokens of the reference", f"others for handle {handle}: {tokens}")


@CASES.must("A request stops at one of its stop_token_ids, with stop_token_id as the last token of the row.")
async def stop_token(engine: EngineUnderTest) -> None:
    reference = await engine.reference()
    # The first occurrence counts.
    stop_at = reference[len(reference) // 2]
    expected = reference[: reference.index(stop_at) + 1]
    stream = await engine.open()
    await stream.add(engine.entry(1, sampling={"stop_token_ids": [stop_at]}))
    await stream.until_finished(1)
    finished = stream.record.finished[1]
    expect(finished.reason == output_pb2.FINISH_REASON_STOP, "reason STOP", finished.reason)
    expect(finished.stop_token_id == stop_at, f"stop_token_id {stop_at}", finished)
    expect(stream.record.tokens[1] == expected, f"tokens up to {stop_at}", stream.record.tokens[1])


@CASES.must("Log probabilities are sent where a request asked for them; other rows of a message have NaN.")
async def logprobs(engine: EngineUnderTest) -> None:
    stream = await engine.open()
    await stream.add(engine.entry(1, sampling={"logprobs": 2}), engine.entry(2))
    record = stream.record
    await stream.until(
        lambda: record.has_ended(2) and (record.has_ended(1) or 1 in record.rejected), "both ends"
    )
    if isinstance(record.rejected.get(1), Unimplemented):
        raise NotApplicable("the engine does not serve log probabilities")
    for step in record.steps:
        for handle, values in _logprobs_by_handle(step):
            has_values = [not math.isnan(value) for value in values]
            expected = f"{'numbers' if handle == 1 else 'NaN'} for handle {handle}"
            expect(all(has == (handle == 1) for has in has_values), expected, values)


def _logprobs_by_handle(step: step_pb2.Step) -> list[tuple[int, list[float]]]:
    """The log probabilities of each row; rows of a step without any have NaN."""
    handles = struct.unpack(f"<{len(step.handles) // 4}I", step.handles)
    wide = struct.unpack(f"<{len(step.num_tokens_wide) // 4}I", step.num_tokens_wide)
    counts = wide or step.num_tokens or bytes(len(handles))
    values = list(struct.unpack(f"<{len(step.sampled_logprobs) // 4}f", step.sampled_logprobs))
    values = values or [math.nan] * sum(counts)
    rows, position = [], 0
    for handle, count in zip(handles, counts, strict=True):
        rows.append((handle, values[position : position + count]))
        position += count
    return rows
