"""Every field of a request declares its limits or its meaning where unset, and stands in docs/fields.md."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor

from tools.rules_doc import FILE, generated, is_alternative, request_fields
from triptych_kit.rules import declared_rules

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


def has_rule(field: FieldDescriptor) -> bool:
    rules = declared_rules(field)
    return rules is not None and len(rules.ListFields()) > 0


def test_every_field_of_a_request_has_a_rule_or_a_meaning_where_unset() -> None:
    fields = list(request_fields())
    without = {field.full_name for field in fields if not has_rule(field)}
    # One message of several: its fields have the rules.
    choices = {
        field.full_name for field in fields if field.message_type is not None and is_alternative(field)
    }
    assert len(fields) > 200
    assert without - choices == set(WITHOUT_RULES)


def test_the_document_is_up_to_date() -> None:
    document = FILE.read_text(encoding="utf-8")
    assert generated(document) == document, "run python tools/rules_doc.py"
