"""Cases about prompts with embeddings, of a size that is sent inline and of one that is uploaded."""

from __future__ import annotations

import secrets
import struct

from triptych.common.v1 import tensor_pb2
from triptych_conformance.cases import Cases, NotApplicable, Section, expect
from triptych_conformance.frontend_under_test import EMBEDDING_BYTES, Attempt, ClientCall, FrontendUnderTest
from triptych_kit.errors import InvalidArgument, Unavailable, Unimplemented

CASES: Cases[FrontendUnderTest] = Cases(Section.TENSORS)

_MAX_INLINE_BYTES = 256 * 1024
_NUM_LARGE = 1 + _MAX_INLINE_BYTES // EMBEDDING_BYTES


@CASES.should("A tensor of up to 256 KiB is inline.")
async def small_tensor(frontend: FrontendUnderTest) -> None:
    call, embeds = _with_embeds(frontend, 2)
    attempt = await _attempt_of(frontend, call)
    payload = attempt.entry.prompt_embeds.WhichOneof("payload")
    expect(payload == "inline", "an inline tensor", payload)
    await _must_be_whole(frontend, call, attempt, embeds)


@CASES.must("A larger tensor is in shared memory after a proof, or uploaded before the ADD that names it.")
async def large_tensor(frontend: FrontendUnderTest) -> None:
    call, embeds = _with_embeds(frontend, _NUM_LARGE)
    attempt = await _attempt_of(frontend, call)
    payload = attempt.entry.prompt_embeds.WhichOneof("payload")
    # The engines of the kit have no host_probe, so that there is no proof.
    expect(payload == "blob", "a tensor that was uploaded", payload)
    await _must_be_whole(frontend, call, attempt, embeds)


@CASES.must("An ADD that is rejected with BLOB_NOT_FOUND is sent again after another upload.")
async def lost_blob(frontend: FrontendUnderTest) -> None:
    call, embeds = _with_embeds(frontend, _NUM_LARGE)
    attempt = await _attempt_of(frontend, call)
    for engine in frontend.engines:
        engine.blobs.clear()
    attempt.reject(Unavailable("conformance", reason="BLOB_NOT_FOUND"))
    again = await frontend.attempt_of(call, after=attempt)
    await _must_be_whole(frontend, call, again, embeds)


def _with_embeds(frontend: FrontendUnderTest, num_embeds: int) -> tuple[ClientCall, bytes]:
    """A client's request that begins with so many embeddings, and these."""
    num_values = num_embeds * EMBEDDING_BYTES // 4
    # Other values for each call: what an engine holds already need not be uploaded.
    first = secrets.randbelow(1000)
    embeds = struct.pack(f"<{num_values}f", *((first + number) % 97 for number in range(num_values)))
    return frontend.generate(2, embeds=embeds), embeds


async def _attempt_of(frontend: FrontendUnderTest, call: ClientCall) -> Attempt:
    await frontend.until(lambda: frontend.attempts_of(call) or call.is_over, "an ADD")
    if isinstance(call.error, Unimplemented | InvalidArgument):
        raise NotApplicable(f"the frontend does not serve embeddings: {call.error}")
    return await frontend.attempt_of(call)


async def _must_be_whole(
    frontend: FrontendUnderTest, call: ClientCall, attempt: Attempt, embeds: bytes
) -> None:
    """The ADD has the client's embeddings, where the engine finds them."""
    tensor, num_embeds = attempt.entry.prompt_embeds, len(embeds) // EMBEDDING_BYTES
    expect(tensor.dtype == tensor_pb2.D_TYPE_FP32, "the client's dtype", tensor.dtype)
    expected = [num_embeds, EMBEDDING_BYTES // 4]
    expect(list(tensor.shape) == expected, f"shape {expected}", list(tensor.shape))
    num_tokens = len(call.prompt) - num_embeds
    expect(
        attempt.entry.is_token == bytes(num_embeds) + bytes([1]) * num_tokens,
        f"is_token of {num_embeds} embeddings and {num_tokens} tokens",
        attempt.entry.is_token,
    )
    payload = tensor.WhichOneof("payload")
    content = tensor.inline
    if payload == "blob":
        uploaded = attempt.session.blobs_at_add
        expect(tensor.blob.sha256 in uploaded, "an upload before the ADD", f"{len(uploaded)} others")
        content = uploaded[tensor.blob.sha256]
        expect(tensor.blob.size == len(content), f"size {len(content)}", tensor.blob.size)
    expect(content == embeds, "the client's embeddings", f"{len(content)} other bytes")
    attempt.send([5, 6], is_first=True, ends=True)
    await frontend.must_finish(call, [5, 6])
