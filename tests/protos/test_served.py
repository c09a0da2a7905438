"""The words "Not served yet" in the protos say what the code does not serve, and nothing else has them."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

import triptych_cli.tiny_model
from engine_svc.admin.utility import ENGINE_CALLS
from engine_svc.build.features import wire_features
from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext, WireFeatures
from frontend_svc.generation.preprocess import CORE_FIELDS
from frontend_svc.options import OPTIONS
from tests.architecture.test_documents import entry_with, sources
from tests.engine_svc.session.service_rig import make_facts
from tests.protos.contract_descriptors import comments_of, load_descriptors
from triptych.engine.v1 import add_pb2, utility_pb2
from triptych_kit.errors import InvalidArgument, NotFound, Unimplemented

EMBEDDED = Path(triptych_cli.tiny_model.__file__).parent / "weights"
WORDS = "Not served yet"
# Where the messages of a package are written and read.
SERVERS = {
    "triptych.engine.v1": (
        "engine_svc/convert/*.py", "engine_svc/session/*.py", "engine_svc/admin/*.py",
        "engine_svc/features/*/wire.py", "engine_svc/tensors/*.py", "engine_svc/adoption/*.py",
    ),
    "triptych.common.v1": (
        "engine_svc/convert/*.py", "engine_svc/features/*/wire.py", "engine_svc/tensors/*.py",
        "frontend_svc/**/*.py",
    ),
    "triptych.api.v1": ("frontend_svc/**/*.py",),
    "triptych.admin.v1": ("triptych_kit/**/*.py", "engine_svc/admin/*.py"),
    "triptych.coordinator.v1": (
        "coordinator_svc/**/*.py", "engine_svc/membership/*.py", "frontend_svc/engines/**/*.py",
    ),
}  # fmt: skip
# Refused by name, by code that reads them for that.
REFUSED = {"ChatPart.media", "PinRequest.adapter", "Tensor.remote"}
Files = list[descriptor_pb2.FileDescriptorProto]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return load_descriptors(tmp_path_factory.mktemp("descriptors"))


def test_an_rpc_is_marked_unless_a_servicer_has_it(files: Files) -> None:
    texts = [text for _, text in sources("*_svc/**/*.py", "triptych_kit/**/*.py")]
    rpcs, served, marked = set(), set(), set()
    for file in files:
        comments = comments_of(file)
        for index, service in enumerate(file.service):
            for number, rpc in enumerate(service.method):
                name = f"{service.name}.{rpc.name}"
                rpcs.add(name)
                servicers = [text for text in texts if f".{service.name}Servicer)" in text]
                if any(f" def {rpc.name}(" in text for text in servicers):
                    served.add(name)
                if WORDS in comments.get((6, index, 2, number), ""):
                    marked.add(name)
    assert marked == rpcs - served
    assert len(rpcs) > 40


def test_a_field_is_marked_unless_it_is_served(files: Files) -> None:
    """Fields of messages that only fields without service lead to need no mark."""
    marked = {name for name, comment in fields_in_use(files) if WORDS in comment}
    unserved = {name for name, _ in fields_in_use(files) if not is_served(name, files)}
    assert marked == unserved


def fields_in_use(files: Files) -> Iterator[tuple[str, str]]:
    """Names and comments of the fields that messages of served RPCs have, through fields without a mark."""
    messages = {}
    for file in files:
        comments = comments_of(file)
        for index, message in enumerate(file.message_type):
            messages[f".{file.package}.{message.name}"] = (message, comments, index)
    reached = [
        type_name
        for file in files
        for index, service in enumerate(file.service)
        for number, rpc in enumerate(service.method)
        if WORDS not in comments_of(file).get((6, index, 2, number), "")
        for type_name in (rpc.input_type, rpc.output_type)
    ]
    seen = set()
    while reached:
        type_name = reached.pop()
        if type_name in seen:
            continue
        seen.add(type_name)
        message, comments, index = messages[type_name]
        for number, field in enumerate(message.field):
            comment = comments.get((4, index, 2, number), "")
            yield f"{message.name}.{field.name}", comment
            if field.type_name in messages and WORDS not in comment:
                reached.append(field.type_name)


def is_served(name: str, files: Files) -> bool:
    owner, _, field = name.partition(".")
    if name in REFUSED:
        return False
    if owner in ("GenerateRequest", "ChatRequest"):
        return field in CORE_FIELDS or any(field in option.fields for option in OPTIONS)
    if owner == "AddEntry":
        return not is_refused_in_an_add(field)
    if owner == "SamplingParams":
        return any(f"sampling.{field}" in option.fields for option in OPTIONS)
    if owner == "UtilityCall" and field in CALLS:
        return field in {call.name for call in (*ENGINE_CALLS, *every_feature().utilities)}
    package = next(
        file.package for file in files if any(message.name == owner for message in file.message_type)
    )
    use = re.compile(rf'\.{field}\b|\b{field}=|"{field}"')
    return any(use.search(text) for _, text in sources(*SERVERS[package]))


def is_refused_in_an_add(field: str) -> bool:
    features = every_feature()
    try:
        entry = entry_with(add_pb2.AddEntry.DESCRIPTOR.fields_by_name[field])
        facts = replace(make_facts(), expert_choices=(1, 1), state_size=1)
        features.parse(entry, AddContext(facts, None, []))
    except Unimplemented:
        # Here the entry has no source of tensors, and the model no encoder.
        return field not in ("prompt_embeds", "media")
    except (InvalidArgument, NotFound):
        return False
    return False


@functools.cache
def every_feature() -> WireFeatures:
    """Of an engine with all features that have to be enabled."""
    options = {"enable_prompt_embeds": True, "enable_lora": True, "runner": "generate", "convert": "embed"}
    options["scheduling_policy"] = "continuum"
    return wire_features(EngineConfig(str(EMBEDDED), max_forward_output_bytes=1, **options))


CALLS = {field.name for field in utility_pb2.UtilityCall.DESCRIPTOR.oneofs_by_name["call"].fields}
