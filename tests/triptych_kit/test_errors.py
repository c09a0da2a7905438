from __future__ import annotations

from typing import Any
from urllib.parse import quote

import grpc
import pytest

from tests.triptych_kit.fakes import FakeService, call_unary, serving
from triptych_kit import errors
from triptych_kit.errors import (
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    ServiceError,
    Unavailable,
    Unimplemented,
    from_rpc_error,
    from_status,
    to_status,
    with_fields,
)

SIMPLE_ERRORS = [
    errors.InvalidArgument,
    errors.AlreadyExists,
    errors.ResourceExhausted,
    errors.FailedPrecondition,
    errors.Unavailable,
    errors.DeadlineExceeded,
    errors.Unimplemented,
    errors.PermissionDenied,
    errors.Unauthenticated,
    errors.Aborted,
    errors.Cancelled,
    errors.OutOfRange,
    errors.DataLoss,
    errors.Internal,
    errors.ServiceError,
]


async def answered_with(error: Exception) -> ServiceError:
    """What a client sees of `error` raised in a handler, over a real connection."""

    async def fail(request: bytes, context: Any) -> bytes:
        raise error

    async with serving([FakeService(unary=fail).register()]) as (_, channel):
        with pytest.raises(grpc.RpcError) as caught:
            await call_unary(channel)
        return from_rpc_error(caught.value)


@pytest.mark.parametrize("kind", SIMPLE_ERRORS)
async def test_every_error_keeps_its_details_over_the_wire(kind: type[ServiceError]) -> None:
    error = kind("pool is full", reason="POOL_FULL", metadata={"limit": "8"}, retry_after_ms=1500)
    seen = await answered_with(error)
    assert type(seen) is kind
    assert (seen.message, seen.reason, seen.metadata, seen.retry_after_ms) == (
        "pool is full",
        "POOL_FULL",
        {"limit": "8"},
        1500,
    )


async def test_field_violations_travel() -> None:
    error = InvalidArgument(
        "n is 99, limit 64", field="sampling.n", violations=[("sampling.seed", "too large")]
    )
    seen = await answered_with(error)
    assert isinstance(seen, InvalidArgument)
    assert seen.violations == [("sampling.n", "n is 99, limit 64"), ("sampling.seed", "too large")]


async def test_the_missing_resource_travels() -> None:
    seen = await answered_with(NotFound("no model x", resource_type="model", resource_name="x"))
    assert isinstance(seen, NotFound)
    assert (seen.resource_type, seen.resource_name) == ("model", "x")


async def test_a_reason_is_never_empty_and_a_retry_only_where_given() -> None:
    seen = await answered_with(Unavailable("draining"))
    assert (seen.reason, seen.retry_after_ms, seen.metadata) == ("UNAVAILABLE", None, {})


async def test_a_bare_status_becomes_the_error_of_its_code() -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
        return b""

    async with serving([FakeService(unary=fail).register()]) as (_, channel):
        with pytest.raises(grpc.RpcError) as caught:
            await call_unary(channel)
    seen = from_rpc_error(caught.value)
    assert type(seen) is ResourceExhausted
    assert (seen.message, seen.reason) == ("busy", "RESOURCE_EXHAUSTED")


def largest_error() -> InvalidArgument:
    # Characters outside of ASCII take nine bytes each in a status message.
    name = "\u4e16" * 100_000
    violations = [(f"field{index}.{name}", name) for index in range(1000)]
    return InvalidArgument(
        name, violations=violations, metadata={f"{index}{name}": name for index in range(100)}
    )


def test_the_largest_status_stays_below_what_a_client_may_refuse_by_chance() -> None:
    status = to_status(largest_error())
    details = dict(status.trailing_metadata)["grpc-status-details-bin"]
    # gRPC's clients refuse more than 8 KiB of metadata now and then, 16 KiB always.
    assert len(quote(status.details)) + len(details) < 7500


def test_an_error_says_no_more_than_is_sent_to_the_peer() -> None:
    # Spans and logs keep what it says.
    error = largest_error()
    assert str(error) == error.message == to_status(error).details
    assert InvalidArgument("x" * 1_000_000, field="prompt").violations == [("prompt", "x" * 509 + "...")]


def test_a_word_before_a_message_that_was_cut_leaves_a_status_no_longer() -> None:
    error = largest_error()
    error.message = f"call to pause failed: {error.message}"
    assert len(to_status(error).details.encode()) <= 512


async def test_a_stranger_cannot_make_a_status_too_large_to_arrive() -> None:
    seen = await answered_with(largest_error())
    assert type(seen) is InvalidArgument
    assert seen.message.endswith("...")
    assert len(seen.violations) == 8


async def test_details_that_contradict_are_ignored() -> None:
    async def fail(request: bytes, context: Any) -> bytes:
        trailers = (("grpc-status-details-bin", b"\xff\xff not a status"),)
        await context.abort(grpc.StatusCode.ABORTED, "lost a race", trailing_metadata=trailers)
        return b""

    async with serving([FakeService(unary=fail).register()]) as (_, channel):
        with pytest.raises(grpc.RpcError) as caught:
            await call_unary(channel)
    assert type(from_rpc_error(caught.value)) is errors.Aborted


def test_a_status_names_code_and_message() -> None:
    status = to_status(Unavailable("engine is draining"))
    assert (status.code, status.details) == (grpc.StatusCode.UNAVAILABLE, "engine is draining")


def test_a_status_that_travelled_as_data_is_the_error_it_was() -> None:
    sent = errors.NotFound("no such thing", resource_type="model", resource_name="gpt-9", reason="GONE")
    status = to_status(sent)
    details = dict(status.trailing_metadata)["grpc-status-details-bin"]
    seen = from_status(status.code.value[0], status.details, details, retry_after_ms=250)
    assert isinstance(seen, errors.NotFound)
    assert (seen.message, seen.resource_name, seen.reason) == ("no such thing", "gpt-9", "GONE")
    assert seen.retry_after_ms == 250


@pytest.mark.parametrize("code", [0, 99])
def test_a_code_that_is_no_error_is_the_peers_fault(code: int) -> None:
    seen = from_status(code, "", b"nonsense")
    assert (type(seen), seen.message) == (errors.Internal, "INTERNAL")


def test_fields_have_other_names_in_texts_too() -> None:
    def name_of(field: str) -> str:
        return field.removeprefix("sampling.")

    wrong = InvalidArgument("sampling.n is 0, must be 1", field="sampling.n", reason="INVALID_REQUEST")
    renamed = with_fields(wrong, name_of)
    assert isinstance(renamed, InvalidArgument)
    assert (renamed.message, renamed.reason) == ("n is 0, must be 1", "INVALID_REQUEST")
    assert renamed.violations == [("n", "n is 0, must be 1")]
    assert wrong.violations == [("sampling.n", "sampling.n is 0, must be 1")]
    missing = Unimplemented("not served: sampling.n", metadata={"fields": "sampling.n"})
    renamed = with_fields(missing, name_of)
    assert (renamed.message, renamed.metadata) == ("not served: n", {"fields": "n"})
    absent = NotFound("no model 'x'", resource_type="model", resource_name="x")
    assert with_fields(absent, name_of).__dict__ == absent.__dict__
