"""Encodes results, from the rank that samples to the engine and to earlier stages. Knows no channel."""

from __future__ import annotations

import struct

from engine_svc.core.binary_form import form_of
from engine_svc.core.byte_fields import FieldReader, FieldWriter, MessageError
from engine_svc.core.extras import NO_EXTRAS, ExtraCodec
from engine_svc.core.step import StepResult, TokenLogprobs

VERSION = 5

# Version, step number, number of rows, of drafts, of logprobs, of failed rows.
_HEADER = struct.Struct("<BQIIII")
_ROW = struct.Struct("<I")
_LOGPROBS = form_of(TokenLogprobs)


def encode_result(result: StepResult, extras: ExtraCodec = NO_EXTRAS) -> bytes:
    """The result as bytes. Raises UnknownExtra for an extra that is not registered."""
    extras.check(result.extras)
    writer = FieldWriter()
    writer.fixed(
        _HEADER,
        VERSION,
        result.step_number,
        len(result.sampled),
        len(result.drafts),
        len(result.logprobs),
        len(result.failed),
    )
    writer.ints([len(token_ids) for token_ids in result.sampled])
    writer.ints([token_id for token_ids in result.sampled for token_id in token_ids])
    writer.counted_ints(result.non_finite)
    writer.counted_ints(result.barred)
    writer.counted_ints(result.num_drafts)
    for request_id, drafts in result.drafts.items():
        writer.text(request_id)
        writer.counted_ints(drafts)
    for row, token_logprobs in result.logprobs.items():
        writer.fixed(_ROW, row)
        _LOGPROBS.write(writer, token_logprobs)
    for row, message in result.failed.items():
        writer.fixed(_ROW, row)
        writer.text(message)
    extras.write_rows(writer, result.extras)
    return writer.message()


def decode_result(message: bytes, extras: ExtraCodec = NO_EXTRAS) -> StepResult:
    """The result that was encoded. Raises MessageError for bytes of another version or form."""
    reader = FieldReader(message)
    version, step_number, num_rows, num_drafts, num_logprobs, num_failed = reader.fixed(_HEADER)
    if version != VERSION:
        raise MessageError(f"a result has version {version}, this side reads {VERSION}")
    counts = reader.ints(num_rows)
    token_ids = iter(reader.ints(int(counts.sum())).tolist())
    result = StepResult(
        step_number, sampled=[[next(token_ids) for _ in range(count)] for count in counts.tolist()]
    )
    result.non_finite = reader.counted_ints()
    result.barred = reader.counted_ints()
    result.num_drafts = reader.counted_ints()
    for _ in range(num_drafts):
        request_id = reader.text()
        result.drafts[request_id] = reader.counted_ints()
    for _ in range(num_logprobs):
        (row,) = reader.fixed(_ROW)
        result.logprobs[row] = _LOGPROBS.read(reader)
    for _ in range(num_failed):
        (row,) = reader.fixed(_ROW)
        result.failed[row] = reader.text()
    result.extras = extras.read_rows(reader)
    reader.finish()
    return result
