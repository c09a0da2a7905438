"""What each package loads: light services stay light, no import circles, no folder hides a package."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import grimp
import pytest

from tests.architecture.sources import PACKAGES, ROOT

HEAVY = ("torch", "triton", "transformers", "numpy", "PIL")
SOURCE_PATH = os.pathsep.join(str(ROOT / folder) for folder in (".", "protos", "kernels"))

# Of the frontend, what only a process beside it loads.
IN_WORKERS = "frontend_svc.media.processing."
LIST_LOADED = """
import importlib, json, pkgutil, sys
for name in {packages}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, name + "."):
        if not module.name.startswith({apart!r}):
            importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""


def in_fresh_process(program: str) -> str:
    """Run `program` with the source roots alone on its path, in the root, as a contributor would."""
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": SOURCE_PATH},
        capture_output=True,
        check=True,
        text=True,
    ).stdout


@pytest.mark.parametrize(
    ("packages", "forbidden"),
    [
        (["triptych_kit"], (*HEAVY, "tokenizers")),
        (["coordinator_svc"], (*HEAVY, "tokenizers", "frontend_svc", "engine_svc")),
        (["frontend_svc"], (*HEAVY, "llguidance", "triptych_kernels", "engine_svc", "coordinator_svc")),
        (["triptych_client"], (*HEAVY, "tokenizers", "triptych_kit", "opentelemetry")),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_light_packages_load_nothing_heavy(packages: list[str], forbidden: tuple[str, ...]) -> None:
    loaded = set(json.loads(in_fresh_process(LIST_LOADED.format(packages=packages, apart=IN_WORKERS))))
    assert loaded & set(forbidden) == set()


@pytest.mark.parametrize(
    "module", ["engine_svc.scheduler.scheduler", "engine_svc.cache.kv_cache", "engine_svc.loop.mailbox"]
)
def test_the_core_of_the_engine_loads_no_tensors_and_no_wire(module: str) -> None:
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    assert set(json.loads(in_fresh_process(program))) & {"torch", "grpc", "triptych"} == set()


def test_an_engine_listens_before_it_loads_torch() -> None:
    program = "import json, sys, engine_svc.process.run; print(json.dumps(sorted(sys.modules)))"
    assert set(json.loads(in_fresh_process(program))) & {"torch", "transformers"} == set()


@pytest.mark.parametrize(
    "package",
    ["triptych_kit", "coordinator_svc", "frontend_svc", "engine_svc", "triptych_cli", "triptych_conformance"],
)
def test_a_package_itself_imports_nothing_heavy(package: str) -> None:
    program = f"import json, sys, {package}; print(json.dumps(sorted(sys.modules)))"
    assert set(json.loads(in_fresh_process(program))) & {*HEAVY, "grpc"} == set()


def test_transformers_can_be_imported_from_the_source_tree() -> None:
    program = (
        "import transformers; from transformers import LlamaForCausalLM; print(transformers.__version__)"
    )
    assert in_fresh_process(program).strip()


def test_there_are_no_import_circles() -> None:
    packages = tuple(package for package in PACKAGES if "/" not in package)
    graph = grimp.build_graph(*packages, exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert [sorted(circle) for circle in _circles(imports)] == []


def _circles(imports: dict[str, set[str]]) -> list[set[str]]:
    # A module is on a circle when it can be reached from itself.
    reachable = {module: _reached_from(module, imports) for module in imports}
    on_circle = {module for module, reached in reachable.items() if module in reached}
    return [{other for other in on_circle if other in reachable[module]} for module in sorted(on_circle)]


def _reached_from(start: str, imports: dict[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += imports.get(module, ())
    return reached
