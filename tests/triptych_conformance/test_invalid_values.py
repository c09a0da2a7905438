"""Invalid values are made for every rule of a field, and each breaks a rule of its own field."""

from __future__ import annotations

import re

import pytest
from google.protobuf.message import Message

from tools.rules_doc import fields_of
from triptych.admin.v1 import admin_pb2
from triptych.api.v1 import chat_message_pb2, embedding_pb2, generate_pb2
from triptych.engine.v1 import add_pb2, session_pb2
from triptych_conformance.invalid_values import invalid_messages
from triptych_kit.rules import MAX_LOGPROBS, MODEL_LENGTH, VOCABULARY, MessageRules, declared_rules

LIMITS = {VOCABULARY: 100, MODEL_LENGTH: 200, MAX_LOGPROBS: -1}
# Parts of rules that refuse no value by themselves.
NOT_CHECKED = {
    "unset",
    "unit",
    "where",
    "in_parent_name",
    "passed_on",
    "raised_to",
    "lowered_to",
    "max_results",
}
# Values that break its rule are too large to be sent.
WITHOUT_VALUES = {"inline"}


@pytest.mark.parametrize(
    "message",
    [
        add_pb2.AddEntry,
        session_pb2.Hello,
        generate_pb2.GenerateRequest,
        chat_message_pb2.ChatRequest,
        embedding_pb2.EmbedRequest,
        admin_pb2.WatchSchedulerRequest,
    ],
    ids=lambda message: message.DESCRIPTOR.name,
)
def test_every_value_breaks_a_rule_of_its_field(message: type[Message]) -> None:
    rules, made = MessageRules(message), set()
    required = {violation.field for violation in rules.violations(message(), LIMITS)}
    for path, invalid in invalid_messages(message, LIMITS):
        made.add(path.rpartition(".")[2])
        broken = {violation.location for violation in rules.violations(invalid, LIMITS)}
        paths = {re.sub(r"\[\d+\]", "", location) for location in broken}
        assert any(path.startswith(one) for one in paths - (required - {path})), (path, broken)
    limited = {
        field.name
        for field in fields_of(message.DESCRIPTOR, set())
        if (declared := declared_rules(field)) is not None
        and {part.name for part, _ in declared.ListFields()} - NOT_CHECKED
    }
    assert limited - made <= WITHOUT_VALUES
