"""A short cell of every acceptance scenario, and MaskBench and another model where they are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import run_scenario, scenario_names
from tests.acceptance import scenarios

pytestmark = pytest.mark.acceptance

_CELLS = {
    "calls_beside_schema": ("--parser=hermes", "--parser=pythonic"),
    # Gaps of streams are measured by their own commands.
    "floods": (
        *("--listener=frontend", "--tls=yes", "--only", "SETTINGS, unread", "CONTINUATION"),
        *("--seconds=2", "--turns=1", "--max-added-ms=inf"),
    ),
    "formats": ("--format", "awq", "--only", "alone", "drafts", "kill -9", "--prompts=16"),
    "hostile_grammars": ("--only", "exploding patterns", "--rounds=1", "--max-added-ms=inf"),
    "jobs": ("--jobs=8", "--only", "fcfs", "continuum"),
    "languages": ("--schemas=60", "--patterns=20", "--grammars=20"),
    "mask_agreement": ("--states=300",),
    # Gaps and times are measured by its own command.
    "pins": ("--turns=1", "--loads=1", "--max-added-ms=inf", "--max-start-s=inf"),
    "poison": ("--rounds=1", "--variations=2", "--streams=8"),
    "sessions": ("--scripts=80", "--kills=2"),
    "speculation": ("--proposer=ngram", "--proposer=scripted"),
    "state_hits": ("--family=nemotron_h", "--shared=100", "--conversations=12"),
    "states": ("--family=qwen3_5", "--only", "alone", "hits, odd chunks", "kill -9", "--prompts=16"),
}
_NAMES = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
# In the form of MaskBench: instances, and whether each is valid.
_SCHEMAS: dict[str, tuple[Any, dict[str, bool]]] = {
    "object": (_NAMES, {'{"name": "a"}': True, '{"name": 1}': False, "{}": False}),
    "range": ({"type": "integer", "minimum": 3, "maximum": 12}, {"3": True, "12": True, "13": False}),
    "choice": ({"enum": ["red", 2, None]}, {'"red"': True, "2": True, "null": True, '"blue"': False}),
    "tuple": (
        {
            "type": "array",
            "prefixItems": [{"type": "boolean"}, {"type": "null"}],
            "items": False,
            "minItems": 2,
        },
        {"[true, null]": True, "[true]": False, "[true, null, 1]": False},
    ),
    "reference": (
        {"$defs": {"n": _NAMES}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 2},
        {"[]": True, '[{"name": "b"}]': True, "[{}]": False},
    ),
    "exclusive": (
        {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
        {'"abc"': True, "7": True, '"abcd"': False, "[]": False},
    ),
    "names": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
        {'{"x1": 1}': True, '{"x1": "a"}': False, '{"y": 1}': False},
    ),
}


@pytest.mark.parametrize("name", sorted(_CELLS))
def test_promises_are_kept_in_a_short_cell(name: str, request: pytest.FixtureRequest) -> None:
    model = request.config.getoption("--model", None) or "embedded"
    words = [f"--model={model}"] if name in ("languages", "speculation") else []
    assert _run(name, *words, *_CELLS[name]) == 0


def test_auto_serves_what_a_backend_alone_serves(corpus: str, tmp_path: Path) -> None:
    report = tmp_path / "coverage.json"
    folder = tmp_path if corpus == "own" else Path(corpus)
    for name, (schema, instances) in _SCHEMAS.items():
        tests = [{"data": json.loads(text), "valid": is_valid} for text, is_valid in instances.items()]
        (tmp_path / f"Own---{name}.json").write_text(json.dumps({"schema": schema, "tests": tests}))
    assert _run("schema_coverage", str(folder), f"--json={report}") == 0
    rows = json.loads(report.read_text(encoding="utf-8"))["rows"]
    correct = next(row["correct"] for row in rows if (row["subset"], row["compiler"]) == ("all", "auto"))
    assert correct == len(_SCHEMAS) if corpus == "own" else correct > 0


def test_every_scenario_has_a_short_cell() -> None:
    assert {*_CELLS, "schema_coverage"} == {*scenario_names(scenarios)}


def _run(*words: str) -> int:
    return run_scenario(scenarios, "python -m tests.acceptance", "", words)
