"""The contract keeps its own rules: comments, names, presence, widths, columns, current generated code."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from contextlib import suppress
from importlib import import_module
from pathlib import Path, PurePath
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.descriptor import Descriptor, ServiceDescriptor

from tests.protos.contract_descriptors import PROTO_ROOT, elements, load_descriptors, proto_files, run_protoc
from triptych.api.v1 import generate_pb2
from triptych.common.v1 import output_pb2, sampling_pb2
from triptych.engine.v1 import add_pb2, engine_pb2, step_pb2

FieldProto = descriptor_pb2.FieldDescriptorProto
Files = list[descriptor_pb2.FileDescriptorProto]

ZERO_IS_A_VALUE = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "n",
    "logprobs",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stream_interval",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
    "max_draft_tokens",
]
# Of these, protoc makes C++ or Java that does not compile: each message has accessors of the same name.
ACCESSORS_OF_EVERY_MESSAGE = {
    "all_fields",
    "default_instance",
    "default_instance_for_type",
    "descriptor",
    "descriptor_for_type",
    "initialization_error_string",
    "internal_default_instance",
    "parser_for_type",
    "serialized_size",
    "unknown_fields",
}
DENSE_COLUMNS = ["handles", "num_tokens", "num_tokens_wide", "token_ids", "sampled_logprobs", "sampled_ranks"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return load_descriptors(tmp_path_factory.mktemp("descriptors"))


def test_every_element_has_a_comment_that_begins_with_its_name(files: Files) -> None:
    found = [element for file in files for element in elements(file)]
    assert len(found) > 500
    assert [e for e in found if not re.match(rf"{e.name}\b", e.comment)] == []


# They take the requests of the streams and answer as the deprecated unary calls.
SHARING = {"GenerateOnce", "ChatOnce"}


def test_every_rpc_has_its_own_request_and_response(files: Files) -> None:
    used: Counter[str] = Counter()
    for file in files:
        for service in file.service:
            assert service.name.endswith("Service")
            for rpc in service.method:
                if rpc.name in SHARING:
                    continue
                assert rpc.input_type == f".{file.package}.{rpc.name}Request"
                assert rpc.output_type == f".{file.package}.{rpc.name}Response"
                used.update([rpc.input_type, rpc.output_type])
    assert len(used) > 90
    assert set(used.values()) == {1}


def test_every_enum_begins_with_unspecified(files: Files) -> None:
    for file in files:
        for enum in file.enum_type:
            prefix = enum.value[0].name.removesuffix("_UNSPECIFIED")
            assert enum.value[0].number == 0
            assert enum.value[0].name.endswith("_UNSPECIFIED")
            assert all(value.name.startswith(f"{prefix}_") for value in enum.value)


def test_services_stand_in_files_without_optional_fields(files: Files) -> None:
    for file in files:
        optional = [f.name for m in file.message_type for f in m.field if f.proto3_optional]
        assert not (file.service and optional), file.name


def test_what_is_removed_is_reserved_by_number_and_name(files: Files) -> None:
    for file in files:
        for message in file.message_type:
            num_numbers = sum(reserved.end - reserved.start for reserved in message.reserved_range)
            assert num_numbers == len(message.reserved_name), message.name
        for enum in file.enum_type:
            # Of an enum, the end is included.
            num_numbers = sum(reserved.end - reserved.start + 1 for reserved in enum.reserved_range)
            assert num_numbers == len(enum.reserved_name), enum.name


def test_no_field_has_the_name_of_an_accessor_that_every_message_has(files: Files) -> None:
    messages = [message for file in files for message in file.message_type]
    assert [m.name for m in messages if {f.name for f in m.field} & ACCESSORS_OF_EVERY_MESSAGE] == []


def test_there_are_no_maps_and_no_timestamps(files: Files) -> None:
    for file in files:
        others = {name for name in file.dependency if not name.startswith("triptych/")}
        assert others <= {"google/protobuf/descriptor.proto"}, file.name
        for message in file.message_type:
            assert not any(nested.options.map_entry for nested in message.nested_type)


@pytest.mark.parametrize("name", ZERO_IS_A_VALUE)
def test_a_sampling_parameter_of_zero_differs_from_an_unset_one(name: str) -> None:
    params = sampling_pb2.SamplingParams()
    assert not params.HasField(name)
    setattr(params, name, 0)
    assert sampling_pb2.SamplingParams.FromString(params.SerializeToString()).HasField(name)


@pytest.mark.parametrize(
    "name", ["n", "max_tokens", "logprobs", "prompt_logprobs", "seed", "max_draft_tokens"]
)
def test_a_parameter_beyond_32_bits_is_not_truncated(name: str) -> None:
    params = sampling_pb2.SamplingParams()
    setattr(params, name, 2**40 + 1)
    assert getattr(sampling_pb2.SamplingParams.FromString(params.SerializeToString()), name) == 2**40 + 1


def test_priority_and_seed_of_an_add_are_64_bits_wide() -> None:
    entry = add_pb2.AddEntry(priority=-(2**40), request_seed=2**64 - 1)
    again = add_pb2.AddEntry.FromString(entry.SerializeToString())
    assert (again.priority, again.request_seed) == (-(2**40), 2**64 - 1)


@pytest.mark.parametrize("name", DENSE_COLUMNS)
def test_a_dense_column_of_a_step_is_bytes(name: str) -> None:
    field = step_pb2.Step.DESCRIPTOR.fields_by_name[name]
    assert field.type == FieldProto.TYPE_BYTES
    assert not field.is_repeated


def test_step_columns_survive_the_wire() -> None:
    handles, counts, token_ids = [7, 2**32 - 1, 9], [1, 3, 0], [5, 70_000, 0, 2**32 - 1]
    step = step_pb2.Step(
        step_number=2**40,
        handles=array("I", handles).tobytes(),
        num_tokens=bytes(counts),
        token_ids=array("I", token_ids).tobytes(),
        finished=[step_pb2.StepFinished(row=2, reason=output_pb2.FINISH_REASON_ABORT)],
        first=[step_pb2.StepFirst(row=1, num_cached_tokens=16)],
    )
    sent = engine_pb2.ConnectResponse(seq=3, step=step)
    again = engine_pb2.ConnectResponse.FromString(sent.SerializeToString())
    assert again.step.step_number == 2**40
    assert array("I", again.step.handles).tolist() == handles
    assert list(again.step.num_tokens) == counts
    assert array("I", again.step.token_ids).tolist() == token_ids
    assert [(f.row, f.reason) for f in again.step.finished] == [(2, output_pb2.FINISH_REASON_ABORT)]
    assert [(f.row, f.num_cached_tokens) for f in again.step.first] == [(1, 16)]


def test_an_add_of_three_tokens_is_below_200_bytes() -> None:
    entry = add_pb2.AddEntry(
        handle=1000,
        request_id="0123456789abcdef" * 2,
        prompt_token_ids=array("I", [1, 2, 3]).tobytes(),
        sampling=sampling_pb2.SamplingParams(temperature=0.7, top_p=0.9, max_tokens=128),
        request_seed=2**64 - 1,
        remaining_ms=30_000,
        trace_context=add_pb2.TraceContext(traceparent=f"00-{'a' * 32}-{'b' * 16}-01"),
    )
    assert len(engine_pb2.ConnectRequest(add=add_pb2.Add(entries=[entry])).SerializeToString()) < 200


def test_a_step_of_256_rows_is_at_most_10_bytes_a_row() -> None:
    step = step_pb2.Step(
        step_number=10**6,
        handles=array("I", range(256)).tobytes(),
        num_tokens=bytes([1] * 256),
        token_ids=array("I", range(256)).tobytes(),
    )
    assert len(engine_pb2.ConnectResponse(seq=10**6, step=step).SerializeToString()) <= 2560


def test_sampling_and_pooling_exclude_each_other() -> None:
    entry = add_pb2.AddEntry(sampling=sampling_pb2.SamplingParams(max_tokens=1))
    entry.pooling.task = sampling_pb2.POOLING_TASK_EMBED
    assert entry.WhichOneof("params") == "pooling"
    assert add_pb2.AddEntry().WhichOneof("params") is None


def test_an_unknown_message_of_a_stream_reads_as_none() -> None:
    # Field 99, length-delimited, empty: what a newer peer may send.
    unknown = b"\x9a\x06\x00"
    assert engine_pb2.ConnectRequest.FromString(unknown).WhichOneof("message") is None
    assert engine_pb2.ConnectResponse.FromString(unknown).WhichOneof("message") is None


def test_finish_reasons_are_the_five_of_the_glossary() -> None:
    names = [name.removeprefix("FINISH_REASON_") for name in output_pb2.FinishReason.keys()]  # noqa: SIM118
    assert names == ["UNSPECIFIED", "STOP", "LENGTH", "ABORT", "ERROR", "REPETITION"]


def test_an_empty_prompt_differs_from_a_missing_one() -> None:
    assert generate_pb2.GenerateRequest(prompt="").WhichOneof("input") == "prompt"
    assert generate_pb2.GenerateRequest(token_ids=generate_pb2.TokenIds()).WhichOneof("input") == "token_ids"
    assert generate_pb2.GenerateRequest().WhichOneof("input") is None


def test_the_mapping_table_names_what_exists(files: Files) -> None:
    pool = descriptor_pool.DescriptorPool()
    options = descriptor_pb2.FileDescriptorProto()
    descriptor_pb2.DESCRIPTOR.CopyToProto(options)
    for file in (options, *files):
        pool.Add(file)
    text = (PROTO_ROOT / "README.md").read_text()
    names = set(re.findall(r"`((?:common|api|admin|engine|coordinator)\.v1\.\w+(?:\.\w+)?)`", text))
    assert len(names) > 60
    assert [name for name in sorted(names) if not _exists(pool, f"triptych.{name}")] == []
    rows = {int(row) for row in re.findall(r"\| feature row (\d+) \|", text)}
    assert rows == {*range(57, 70), 238, 273}


def test_every_public_call_is_listed_with_the_modules_of_its_messages() -> None:
    def module(element: Descriptor | ServiceDescriptor) -> str:
        return PurePath(element.file.name).stem + "_pb2"

    def module_of(file: str) -> ModuleType:
        return import_module(file.removesuffix(".proto").replace("/", ".") + "_pb2")

    rows = [
        f"| `{service.name}.{call.name}` | `{module(service)}_grpc` "
        f"| `{module(call.input_type)}.{call.input_type.name}` "
        f"| `{module(call.output_type)}.{call.output_type.name}` |"
        for name in proto_files()
        if name.startswith("triptych/api/v1/")
        for service in module_of(name).DESCRIPTOR.services_by_name.values()
        for call in service.methods
    ]
    listed = re.findall(
        r"^\| `\w+Service\.\w+` \|.*\|$", (PROTO_ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(rows)


def test_committed_code_equals_a_fresh_generation(tmp_path: Path) -> None:
    run_protoc(f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", f"--grpc_python_out={tmp_path}")
    fresh = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.py*")}
    committed = {
        str(path.relative_to(PROTO_ROOT)): path.read_bytes()
        for path in PROTO_ROOT.rglob("*_pb2*")
        if path.suffix in {".py", ".pyi"}
    }
    assert len(fresh) == 3 * len(proto_files())
    assert sorted(fresh) == sorted(committed)
    assert [name for name, content in fresh.items() if committed[name] != content] == []


def _exists(pool: descriptor_pool.DescriptorPool, full_name: str) -> bool:
    for find in (pool.FindMessageTypeByName, pool.FindEnumTypeByName, pool.FindFieldByName):
        with suppress(KeyError):
            find(full_name)
            return True
    with suppress(KeyError):
        pool.FindOneofByName(full_name)
        return True
    return False
