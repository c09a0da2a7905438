"""Every field of a request declares its limits, or its meaning where it is unset."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from triptych.api.v1 import chat_message_pb2, embedding_pb2, generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_kit.rules import declared_rules

REQUESTS = (
    sampling_pb2.SamplingParams,
    generate_pb2.GenerateRequest,
    chat_message_pb2.ChatRequest,
    embedding_pb2.EmbedRequest,
    embedding_pb2.ScoreRequest,
    embedding_pb2.RerankRequest,
    embedding_pb2.ClassifyRequest,
    add_pb2.AddEntry,
)
# Required fields without a limit of their own, and the reason.
_TENSORS = "the readers of tensors compare it with the bytes"
_NOT_SERVED = "the field that holds it is refused"
WITHOUT_RULES = {
    "triptych.common.v1.StructuredOutput.json_object": "the option takes true alone",
    "triptych.api.v1.ChatPart.text": "all texts of a conversation are limited together",
    "triptych.api.v1.ToolChoice.name": "one of the request's tools",
    "triptych.api.v1.RerankRequest.query": "the rule of its text refuses an empty one",
    "triptych.api.v1.PromptEmbeds.embeds": _TENSORS,
    "triptych.common.v1.Tensor.dtype": _TENSORS,
    "triptych.common.v1.Tensor.shape": _TENSORS,
    "triptych.common.v1.Tensor.inline": _TENSORS,
    "triptych.common.v1.BlobReference.sha256": _TENSORS,
    "triptych.common.v1.BlobReference.size": _TENSORS,
    "triptych.common.v1.SharedMemoryReference.name": _TENSORS,
    "triptych.common.v1.SharedMemoryReference.offset": _TENSORS,
    "triptych.common.v1.SharedMemoryReference.size": _TENSORS,
    "triptych.common.v1.SharedMemoryReference.owner": _TENSORS,
    "triptych.common.v1.RemoteReference.transport": _NOT_SERVED,
    "triptych.common.v1.RemoteReference.location": _NOT_SERVED,
    "triptych.api.v1.Media.mime_type": _NOT_SERVED,
    "triptych.api.v1.Media.data": _NOT_SERVED,
    "triptych.api.v1.Media.url": _NOT_SERVED,
    "triptych.engine.v1.MediaItem.modality": _NOT_SERVED,
    "triptych.engine.v1.MediaItem.hash": _NOT_SERVED,
    "triptych.engine.v1.MediaItem.placeholder_offset": _NOT_SERVED,
    "triptych.engine.v1.MediaItem.placeholder_length": _NOT_SERVED,
    "triptych.engine.v1.NamedTensor.name": _NOT_SERVED,
    "triptych.engine.v1.NamedTensor.tensor": _NOT_SERVED,
    "triptych.engine.v1.KvTransfer.role": _NOT_SERVED,
}


def fields_of(descriptor: Descriptor, seen: set[str]) -> Iterator[FieldDescriptor]:
    """The fields of a message and of those that it holds, each message once."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        yield field
        if field.message_type is not None:
            yield from fields_of(field.message_type, seen)


def is_choice(field: FieldDescriptor) -> bool:
    """Whether the field is one message of a oneof: its fields have the rules."""
    return (
        field.message_type is not None
        and field.containing_oneof is not None
        and len(field.containing_oneof.fields) > 1
    )


def has_rule(field: FieldDescriptor) -> bool:
    rules = declared_rules(field)
    return rules is not None and len(rules.ListFields()) > 0


def test_every_field_of_a_request_has_a_rule_or_a_meaning_where_unset() -> None:
    seen: set[str] = set()
    fields = [field for request in REQUESTS for field in fields_of(request.DESCRIPTOR, seen)]
    without = {field.full_name for field in fields if not is_choice(field) and not has_rule(field)}
    assert len(fields) > 200
    assert without == set(WITHOUT_RULES)
