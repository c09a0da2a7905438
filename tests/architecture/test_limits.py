"""No limit of a request's field stands as a number in code: the rules of the contract have it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.architecture.sources import ROOT

# The code that reads and checks fields of requests.
READERS = (
    "engine_svc/admin/utility.py",
    "engine_svc/admin/watch.py",
    "engine_svc/adoption/*.py",
    "engine_svc/convert/*.py",
    "engine_svc/features/*/wire.py",
    "engine_svc/session/servicer.py",
    "engine_svc/tensors/*.py",
    "frontend_svc/api/*.py",
    "frontend_svc/generation/answers/*.py",
    "frontend_svc/generation/preprocess.py",
    "frontend_svc/generation/tracing.py",
    "frontend_svc/options/*.py",
    "frontend_svc/protocols/openai/requests.py",
    "frontend_svc/tensors/uploads.py",
    "frontend_svc/parsers/declared_tools.py",
    "frontend_svc/text/chat/*.py",
    "frontend_svc/text/limits.py",
    "frontend_svc/text/pooling.py",
    "frontend_svc/text/prompt.py",
    "triptych_cli/offline/params.py",
)
LIMIT = re.compile(r"_?(MAX|MIN)_[A-Z_]+")
CHECKS = {"need", "need_count", "check", "check_id"}
_OWN = "the service's own work and memory"
ALLOWED = {
    "engine_svc/admin/watch.py MAX_WATCHERS": _OWN,
    "engine_svc/adoption/orphaned_requests.py _MAX_REQUESTS": _OWN,
    "engine_svc/features/adapters/wire.py MAX_ADAPTERS": _OWN,
    "engine_svc/features/adapters/wire.py {1,64}": "also of folders, which are in no message",
    "engine_svc/session/servicer.py _MAX_KV_SUBSCRIPTIONS": _OWN,
    "engine_svc/session/servicer.py _MAX_PARKED_SESSIONS": _OWN,
    "engine_svc/tensors/blobs.py _MAX_UPLOADS": _OWN,
    "engine_svc/tensors/blobs.py _MAX_UPLOAD_S": _OWN,
    "engine_svc/tensors/host_tensor.py MAX_MODERATE": "the range of float16",
    "engine_svc/tensors/source.py _MAX_HELD_BYTES": _OWN,
    "engine_svc/tensors/source.py _MAX_STORE_BYTES": _OWN,
    "frontend_svc/options/adapter.py _MAX_NEEDS": _OWN,
    "frontend_svc/protocols/openai/requests.py _MAX_PROMPTS": "of a list that the contract does not have",
    "frontend_svc/tensors/uploads.py MAX_TRIES": _OWN,
    "frontend_svc/tensors/uploads.py MAX_UPLOADS": _OWN,
    "frontend_svc/tensors/uploads.py _MAX_DELAY_S": _OWN,
    "frontend_svc/text/chat/template.py MAX_TEMPLATE_CHARS": "of a model's own template too",
    "frontend_svc/text/chat/template.py _MAX_COMPILED": _OWN,
    "frontend_svc/text/limits.py _MAX_FOUND": _OWN,
    "frontend_svc/generation/answers/adapters.py _MAX_REPEATED": _OWN,
    "frontend_svc/generation/answers/adapters.py _MAX_WAITING": _OWN,
    "frontend_svc/generation/answers/batch.py _MAX_RUNNING_ITEMS": _OWN,
    "frontend_svc/generation/answers/batch.py _MAX_WAITING_MESSAGES": _OWN,
    "frontend_svc/generation/answers/resumable.py _MAX_READ_LOGS": _OWN,
    "frontend_svc/generation/answers/session.py _MAX_SUM_BYTES": _OWN,
    "frontend_svc/generation/answers/session.py _MAX_WAITING_APPENDS": _OWN,
    "frontend_svc/generation/answers/session.py _MAX_WAITING_BYTES": _OWN,
    "frontend_svc/generation/tracing.py _MAX_ATTEMPTS": _OWN,
    "frontend_svc/generation/tracing.py _MAX_MOMENTS": _OWN,
    "frontend_svc/generation/tracing.py _MAX_MOVES": _OWN,
    "frontend_svc/generation/tracing.py _MAX_STAYS": _OWN,
}


def numbers_in(source: str) -> Iterator[str]:
    """Names of limits that are numbers, lengths in patterns, and numbers above 1 in calls of checks."""
    tree = ast.parse(source)
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=term) if LIMIT.fullmatch(name):
                if all(isinstance(part, ast.Constant | ast.BinOp | ast.operator) for part in ast.walk(term)):
                    yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\{\d+,\d+\}", node.value)
        if not isinstance(node, ast.Call):
            continue
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called not in CHECKS:
            continue
        for part in (each for argument in node.args for each in ast.walk(argument)):
            number = part.value if isinstance(part, ast.Constant) else None
            if isinstance(number, int | float) and number > 1:
                yield f"{called}: {number}"


def test_limits_of_fields_are_rules_of_the_contract() -> None:
    files = [file for pattern in READERS for file in sorted(ROOT.glob(pattern))]
    assert len(files) > 40
    found = {
        f"{file.relative_to(ROOT)} {number}"
        for file in files
        for number in numbers_in(file.read_text(encoding="utf-8"))
    }
    assert found == set(ALLOWED)


@pytest.mark.parametrize(
    ("source", "numbers"),
    [
        ("_MAX_CHOICES = 10_000", ["_MAX_CHOICES"]),
        ("MAX_TEXT_BYTES = 1 << 20", ["MAX_TEXT_BYTES"]),
        ("def f():\n    check(1 <= n <= 64, 'n', n, 'at most 64')", ["check: 64"]),
        ("violations.need_count('stop', num, 'strings', 0, 16)", ["need_count: 16"]),
        ("_NAME = re.compile(r'[a-z]{1,64}')", ["{1,64}"]),
        ("_MAX_WORDS = rules_of(AddEntry, 'bad_words').max_items", []),
        ("violations.need_count('stop', num, 'strings', 1, _MAX_STOP)", []),
    ],
)
def test_a_number_is_seen(source: str, numbers: list[str]) -> None:
    assert list(numbers_in(source)) == numbers
