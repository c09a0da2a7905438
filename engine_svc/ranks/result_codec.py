"""Encodes results, from the rank that samples to the engine and to earlier stages. Knows no channel."""

from __future__ import annotations

import struct

from engine_svc.core.step import PromptTokenLogprobs, StepResult, TokenLogprobs
from engine_svc.ranks.byte_fields import FieldReader, FieldWriter, MessageError

VERSION = 2

# Version, step number, number of rows, of drafts, of logprobs, of prompt logprobs.
_HEADER = struct.Struct("<BQIIII")
_ROW = struct.Struct("<I")
_ROW_AND_POSITION = struct.Struct("<II")
_K = struct.Struct("<I")


def encode_result(result: StepResult) -> bytes:
    writer = FieldWriter()
    writer.fixed(
        _HEADER,
        VERSION,
        result.step_number,
        len(result.sampled),
        len(result.drafts),
        len(result.logprobs),
        len(result.prompt_logprobs),
    )
    writer.ints([len(token_ids) for token_ids in result.sampled])
    writer.ints([token_id for token_ids in result.sampled for token_id in token_ids])
    writer.counted_ints(result.non_finite)
    writer.counted_ints(result.barred)
    for request_id, drafts in result.drafts.items():
        writer.text(request_id)
        writer.counted_ints(drafts)
    for row, token_logprobs in result.logprobs.items():
        writer.fixed(_ROW, row)
        _write_logprobs(writer, token_logprobs)
    for row, prompt in result.prompt_logprobs.items():
        writer.fixed(_ROW_AND_POSITION, row, prompt.first_position)
        _write_logprobs(writer, prompt.token_logprobs)
    return writer.message()


def decode_result(message: bytes) -> StepResult:
    """The result that was encoded. Raises MessageError for bytes of another version or form."""
    reader = FieldReader(message)
    version, step_number, num_rows, num_drafts, num_logprobs, num_prompts = reader.fixed(_HEADER)
    if version != VERSION:
        raise MessageError(f"a result has version {version}, this side reads {VERSION}")
    counts = reader.ints(num_rows)
    token_ids = iter(reader.ints(int(counts.sum())).tolist())
    result = StepResult(
        step_number, sampled=[[next(token_ids) for _ in range(count)] for count in counts.tolist()]
    )
    result.non_finite = reader.counted_ints()
    result.barred = reader.counted_ints()
    for _ in range(num_drafts):
        request_id = reader.text()
        result.drafts[request_id] = reader.counted_ints()
    for _ in range(num_logprobs):
        (row,) = reader.fixed(_ROW)
        result.logprobs[row] = _read_logprobs(reader)
    for _ in range(num_prompts):
        row, first_position = reader.fixed(_ROW_AND_POSITION)
        result.prompt_logprobs[row] = PromptTokenLogprobs(first_position, _read_logprobs(reader))
    reader.finish()
    return result


def _write_logprobs(writer: FieldWriter, token_logprobs: TokenLogprobs) -> None:
    writer.fixed(_K, token_logprobs.k)
    writer.floats(token_logprobs.logprobs)
    writer.counted_ints(token_logprobs.ranks)
    writer.counted_ints(token_logprobs.top_token_ids)
    writer.floats(token_logprobs.top_logprobs)


def _read_logprobs(reader: FieldReader) -> TokenLogprobs:
    (k,) = reader.fixed(_K)
    return TokenLogprobs(
        logprobs=reader.floats(),
        ranks=reader.counted_ints(),
        k=k,
        top_token_ids=reader.counted_ints(),
        top_logprobs=reader.floats(),
    )
