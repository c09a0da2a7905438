"""Documents: sizes, links, paths and flags that exist, and the README's table of what is supported."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from engine_svc.build.features import wire_features
from engine_svc.config import EngineConfig
from engine_svc.convert.feature import AddContext
from engine_svc.model.loading.formats.sources import FORMATS
from engine_svc.scheduler.policies import POLICIES
from frontend_svc.generation.preprocess import CORE_FIELDS
from frontend_svc.options import OPTIONS
from frontend_svc.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from tests.architecture.sources import ROOT
from tests.engine_svc.session.service_rig import make_facts
from triptych.api.v1 import chat_message_pb2, generate_pb2
from triptych.common.v1 import sampling_pb2
from triptych.engine.v1 import add_pb2
from triptych_client.channel_options import ChannelOptions
from triptych_kit.errors import InvalidArgument, Unimplemented
from triptych_kit.limits import PUBLIC
from triptych_kit.plain_fields import plain_fields

GUIDES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
DOCUMENTS = (
    *GUIDES,
    *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md"))),
    "protos/engine-session.md",
)
MOST_LINES = {"README.md": 130, "ARCHITECTURE.md": 250}
MOST_CHARACTERS = 200
MOST_WORDS = 25  # of a table's cell: more of them are a list
# Made from the contract and the tests.
GENERATED = ("docs/fields.md", "docs/clients.md")
WRITTEN = tuple(
    document for document in DOCUMENTS if document not in GENERATED and not document.startswith("protos/")
)
# Of programs of others, in command lines that the documents show.
FOREIGN_FLAGS = {
    "--build-arg",
    "--target",
    "--protocol",
    "--http2-prior-knowledge",
    "--follow",
    "--model-server-metrics-port",
    "--entrypoint",
    "--rm",
    # Of vLLM, of aider and of Continue.
    "--api-key",
    "--openai-api-base",
    "--openai-api-key",
    "--no-show-model-warnings",
    "--map-tokens",
    "--chat-mode",
    "--message",
    "--auto",
    "--exclude",
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PATH = re.compile(r"`([A-Za-z_][\w.-]*(?:/[\w.-]+)*/?)`")
TOP_LEVEL = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}


@functools.cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def test_every_result_file_is_cited_by_a_document() -> None:
    cited = {name for document in DOCUMENTS for name in re.findall(r"\w[\w*-]*\.json", text_of(document))}
    results = [file.name for file in (ROOT / "benchmarks" / "results").iterdir()]
    assert [name for name in results if not any(fnmatch(name, pattern) for pattern in cited)] == []


@pytest.mark.parametrize("document", MOST_LINES)
def test_it_is_short(document: str) -> None:
    assert len(text_of(document).splitlines()) <= MOST_LINES[document]


@pytest.mark.parametrize("document", [*WRITTEN, *GENERATED])
def test_lines_fit_a_screen(document: str) -> None:
    lines = text_of(document).splitlines()
    assert [number for number, line in enumerate(lines, start=1) if len(line) > MOST_CHARACTERS] == []


@pytest.mark.parametrize("document", WRITTEN)
def test_cells_are_no_prose(document: str) -> None:
    lines = text_of(document).splitlines()
    cells = [cell for line in lines if line.lstrip().startswith("|") for cell in line.split("|")]
    assert [cell for cell in cells if len(cell.split()) > MOST_WORDS] == []


def test_the_limits_of_a_request_are_one_number_each():
    limits = PUBLIC.message_limits
    assert limits is not None
    mib = PUBLIC.max_receive_bytes // 2**20
    assert ChannelOptions().max_request_bytes == PUBLIC.max_receive_bytes == mib * 2**20
    shown = f"{mib} MiB; {limits.max_fields:,}; {limits.max_numbers:,}"
    assert f"its packed numbers | {shown} |" in text_of("docs/api.md")
    troubles = text_of("docs/troubleshooting.md")
    assert f"a message above {mib} MiB" in troubles
    assert f"more than {limits.max_fields:,} fields or {limits.max_numbers:,} packed numbers" in troubles


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    assert [target for target in links_of(document) if not is_there(document, target)] == []


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "docs/api.md",
        "docs/operations.md",
        "docs/troubleshooting.md",
    ],
)
def test_every_path_in_backticks_exists(document: str) -> None:
    paths = [
        path for path in PATH.findall(text_of(document)) if path.split("/")[0] in TOP_LEVEL and "/" in path
    ]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_flag_exists(document: str) -> None:
    named = set(FLAG.findall(without_flags_of_others(text_of(document))))
    assert sorted(named - known_flags() - FOREIGN_FLAGS) == []


def test_the_architecture_has_every_folder_of_the_engine() -> None:
    folders = {file.parent.name for file in (ROOT / "engine_svc").glob("*/__init__.py")}
    assert {name for name in folders if f"`engine_svc/{name}/`" not in text_of("ARCHITECTURE.md")} == set()


class TestWhatIsSupported:
    """The table in the README says what the code has."""

    def test_native_models(self) -> None:
        # Not imported: it would bring torch.
        (families,) = matches(r"^_FAMILIES = (\([^)]*\))", "engine_svc/model/native/spec.py")
        named = names_in("native models") | names_in("native models with states")
        assert named == set(ast.literal_eval(families))

    def test_gguf_files(self) -> None:
        architectures = matches(r'^    "([\w-]+)": _[a-z]\w+,$', "engine_svc/model/loading/gguf/config.py")
        types = matches(r'TensorType\("(\w+)"', "engine_svc/model/loading/gguf/file.py")
        assert names_in("architectures of GGUF files") == architectures
        assert names_in("types of blocks in GGUF files") == types

    def test_dtypes(self) -> None:
        assert names_in("dtypes") == choices("dtype") - {"auto"}

    def test_quantization(self) -> None:
        assert names_in("quantization at load, native models") == choices("quantization") - {"none"}

    def test_quantized_checkpoints(self) -> None:
        assert names_in("quantized checkpoints") == {each.name for each in FORMATS}

    def test_devices(self) -> None:
        assert choices("device") - {"auto"} <= names_in("devices")

    def test_what_has_not_run_on_a_gpu_is_marked_beside_its_command(self) -> None:
        (row,) = (row for row in table() if row[0] == "devices")
        assert "not run on a GPU yet: `make test-gpu`, `make bench-gpu`" in row[1]

    def test_scheduling_policies(self) -> None:
        assert names_in("scheduling policies") - {"triptych.policies"} == set(POLICIES)

    def test_routing_policies(self) -> None:
        assert names_in("routing policies") - {"triptych.routing"} == matches(
            r'^ {8}"([\w-]+)": ', "frontend_svc/engines/routing/policies.py"
        )

    def test_parsers(self) -> None:
        assert names_in("tool parsers") == set(TOOL_PARSERS)
        assert names_in("reasoning parsers") == set(REASONING_PARSERS)

    def test_request_fields_that_are_refused_by_name(self) -> None:
        assert names_in("request fields", column=2) == refused_by_the_frontend()


def test_the_page_about_sessions_names_what_the_engine_refuses() -> None:
    (paragraph,) = re.findall(
        r"triptych's engine refuses:\n\s*(.*?)\n-", text_of("protos/engine-session.md"), re.DOTALL
    )
    named = {name.removeprefix("sampling.") for name in re.findall(r"`([a-z_.]+)`", paragraph)}
    assert named == refused_by_the_engine()


def test_the_page_about_sessions_names_tests_that_exist() -> None:
    section = text_of("protos/engine-session.md").split("## 16. Tests")[1]
    named = set(re.findall(r"`(test_\w+)`", section))
    assert len(named) > 50
    assert named - matches(r"^ *(?:async )?def (test_\w+)\(", "tests/**/*.py") == set()


def test_the_page_about_sessions_has_every_reason_of_a_session() -> None:
    folders = ("session", "tensors", "admin", "adoption")
    reasons = reasons_of(*(f"engine_svc/{folder}/*.py" for folder in folders))
    section = text_of("protos/engine-session.md").split("## 14. Statuses")[1].split("\n## ")[0]
    assert len(reasons) >= 20
    assert sorted(reason for reason in reasons if f"`{reason}`" not in section) == []


@pytest.mark.parametrize(
    ("package", "least"),
    [
        ("frontend_svc", 25),
        ("engine_svc", 35),
        ("coordinator_svc", 6),
        ("triptych_kit", 4),
        ("triptych_cli", 2),
    ],
)
def test_operations_explain_every_reason(package: str, least: int) -> None:
    reasons = reasons_of(f"{package}/**/*.py")
    section = text_of("docs/operations.md").split("## Statuses")[1].split("\n## ")[0]
    assert len(reasons) >= least
    assert sorted(reason for reason in reasons if f"`{reason}`" not in section) == []


def test_operations_explain_every_exit_code() -> None:
    codes = matches(r"^EXIT_\w+ = (\d+)", "*_svc/**/*.py")
    section = text_of("docs/operations.md").split("## Exit codes")[1].split("\n## ")[0]
    assert codes >= {"2", "70", "71"}
    assert {code for code in codes if f"| {code} |" not in section} == set()


def test_no_flag_of_vllm_that_is_here_too_is_said_to_be_missing() -> None:
    rows = [
        line.split("|")
        for line in text_of("docs/coming-from-vllm.md").splitlines()
        if line.startswith("| `-")
    ]
    assert len(rows) > 40
    missing = {flag for row in rows if row[2].strip() == "-" for flag in FLAG.findall(row[1])}
    assert missing & engine_flags() == set()


def links_of(document: str) -> list[str]:
    return [
        target for target in LINK.findall(text_of(document)) if not target.startswith(("http:", "https:"))
    ]


def is_there(document: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (ROOT / document).parent / path if path else ROOT / document
    return file.exists() and (not anchor or anchor in anchors_of(file))


@functools.cache
def anchors_of(file: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def without_flags_of_others(text: str) -> str:
    """The text but the first column of the tables about vLLM, whose flags are not ours."""
    lines = []
    is_vllm = False
    for line in text.splitlines():
        is_vllm = line.startswith("| vLLM |") or (is_vllm and line.startswith("|"))
        lines.append("|".join(line.split("|")[2:]) if is_vllm else line)
    return "\n".join(lines)


@functools.cache
def known_flags() -> frozenset[str]:
    """Every flag that a configuration, a verb of the command line or a benchmark has."""
    sampling = (name.replace("_", "-") for name in plain_fields(sampling_pb2.SamplingParams))
    flags = {"--help", "--version"} | {f"--{prefix}{name}" for name in sampling for prefix in ("", "no-")}
    for path, text in sources(
        "*_svc/config.py",
        "engine_svc/features/*/options.py",
        "triptych_cli/**/*.py",
        "triptych_conformance/**/*.py",
        "triptych_kit/config.py",
        "triptych_kit/security/options.py",
    ):
        flags |= set(FLAG.findall(text))
        if path.endswith(("config.py", "options.py", "cli.py", "verbs.py")):
            # Fields of configurations and parameters of verbs are flags by their names.
            names = {name.replace("_", "-") for name in re.findall(r"^ {4}(\w+): ", text, re.MULTILINE)}
            flags |= {f"--{prefix}{name}" for name in names for prefix in ("", "no-")}
    for _, text in sources(
        "benchmarks/**/*.py",
        "tests/acceptance/**/*.py",
        "tests/*/__main__.py",
        "tests/fuzz/schemas/__main__.py",
    ):
        flags |= set(FLAG.findall(text))
    return frozenset(flags)


@functools.cache
def sources(*patterns: str) -> tuple[tuple[str, str], ...]:
    """Paths and texts. They are not parsed, and mostly not imported: that takes seconds."""
    files = sorted({file for pattern in patterns for file in ROOT.glob(pattern)})
    return tuple((file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8")) for file in files)


def matches(pattern: str, *paths: str) -> set[str]:
    """What the group of `pattern` matches in these files."""
    return {found for _, text in sources(*paths) for found in re.findall(pattern, text, re.MULTILINE)}


def reasons_of(*paths: str) -> set[str]:
    """Reasons of statuses: literals, constants, and those that are made of the engine's state."""
    lines = matches(r"^.*?(\breason(?:: str)? ?= ?.*)$", *paths)
    reasons = {reason for line in lines for reason in re.findall(r'"([A-Z_]+)"', line)}
    reasons |= matches(r'raise_if_any\(\s*"([A-Z_]+)"', *paths)
    for name in matches(r"\breason=([A-Z_]+)\b", *paths):
        reasons |= matches(rf'^{name} = "([A-Z_]+)"', *paths)
    if any('reason=f"ENGINE_{state.name}"' in line for line in lines):
        states = matches(r'^    ([A-Z]+) = "', "engine_svc/admin/lifecycle.py") - {"READY"}
        reasons |= {f"ENGINE_{state}" for state in states}
    return reasons


def engine_flags() -> set[str]:
    return {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(EngineConfig)}


def table() -> list[list[str]]:
    section = text_of("README.md").split("## What is supported")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows]


def names_in(title: str, *, column: int = 1) -> set[str]:
    (row,) = (row for row in table() if row[0] == title)
    names: Iterable[str] = re.findall(r"`([^`]+)`", row[column])
    return {name for name in names if not name.startswith(("-", "make "))}


def choices(field: str) -> set[str]:
    (found,) = (each for each in dataclasses.fields(EngineConfig) if each.name == field)
    return set(found.metadata["choices"])


def refused_by_the_frontend() -> set[str]:
    """The last part of each field that a refusal names: `tools[0].strict` is `strict`."""
    fields = matches(r'"not served yet: ([\w.\[\]{}]*\w)"', "frontend_svc/**/*.py")
    fields |= {f"sampling.{name}" for name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name}
    for message in (generate_pb2.GenerateRequest, chat_message_pb2.ChatRequest):
        fields |= set(message.DESCRIPTOR.fields_by_name) - CORE_FIELDS
    fields -= {name for option in OPTIONS for name in option.fields}
    return {field.rpartition(".")[2] for field in fields}


def refused_by_the_engine() -> set[str]:
    """Fields of an ADD and of its sampling parameters that an engine without options refuses by name.

    Frontends send words in another form.
    """
    features = wire_features(EngineConfig(model="unused"))
    refused = {field.name for field in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    refused -= features.sampling_fields | {"bad_words"}
    for field in add_pb2.AddEntry.DESCRIPTOR.fields:
        try:
            features.parse(entry_with(field), AddContext(make_facts(), None, []))
        except Unimplemented:
            refused.add(field.name)
        except InvalidArgument:
            continue
    return refused


def entry_with(field: FieldDescriptor) -> add_pb2.AddEntry:
    """An ADD in which this field alone is set."""
    entry = add_pb2.AddEntry()
    value = getattr(entry, field.name)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        value.add() if field.is_repeated else value.SetInParent()
    else:
        setattr(entry, field.name, type(value)(b"1") if isinstance(value, bytes) else type(value)(1))
    return entry
