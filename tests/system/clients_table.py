"""docs/clients.md, from the packages and the steps that scenarios of clients declare.

python -m tests.system.clients_table
"""

from __future__ import annotations

import ast
import itertools
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("clients")
# A folder for each client that npm has; its package.json declares the steps of its scenario.
NODE_FOLDER = Path(__file__).with_name("node_clients")
# Packages with tests of their own, by the newest release, by the name of their scenarios, whose `WORKS` are
# their steps.
PACKAGES = {"anthropic": "anthropic", "openai": "openai", "realtime": "openai[realtime]"}
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
START = """# Clients that `make test-network` runs

Each client is unmodified, in an environment of its own, against a frontend with the embedded model.
The names link to the programs, which show the settings of a client. Those of `tests/system/clients` install
what they need and run against any server, here against `triptych serve`:

    uv run tests/system/clients/openai_agents_scenario.py http://127.0.0.1:8000/v1

The embedded model follows no instruction. The programs end because their schemas are closed
(`additionalProperties: false`, pydantic's `extra="forbid"`), their values bounded (enums, lengths), and
`parallel_tool_calls` is false; larger models need none of this.
`python -m tests.system.clients_table` makes the table.

| client | packages | works |
|---|---|---|
"""


def scenarios() -> list[Path]:
    return sorted(FOLDER.glob("*_scenario.py"))


def steps_of(scenario: Path) -> list[str]:
    """The docstrings of the functions that the scenario gives to `run`."""
    tree = ast.parse(scenario.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    last = tree.body[-1]
    assert isinstance(last, ast.Expr)
    assert isinstance(last.value, ast.Call)
    names = [name.id for name in last.value.args if isinstance(name, ast.Name)]
    return [ast.get_docstring(functions[name]) or "" for name in names]


def _works(scenario: Path) -> list[str]:
    for node in ast.parse(scenario.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "WORKS":
            works: list[str] = ast.literal_eval(node.value)
            return works
    raise LookupError(f"{scenario.name} has no WORKS")


def npm_package(folder: Path) -> dict[str, Any]:
    package: dict[str, Any] = json.loads((folder / "package.json").read_text())
    return package


def page() -> str:
    rows = []
    for scenario in scenarios():
        text = scenario.read_text()
        packages = ast.literal_eval(text.partition("# dependencies = ")[2].partition("\n")[0])
        client = (ast.get_docstring(ast.parse(text)) or "").rstrip(".")
        rows.append(_rows(client, scenario, packages, steps_of(scenario)))
    for name, package_name in PACKAGES.items():
        scenario = FOLDER.with_name(f"{name}_scenario.py")
        rows.append(_rows(f"{package_name} (PyPI)", scenario, [package_name], _works(scenario)))
    for folder in (*NODE_FOLDER.iterdir(), NODE_FOLDER.with_name("openai_node")):
        if folder.is_dir():
            package = npm_package(folder)
            packages = [f"{name}@{version}" for name, version in package["dependencies"].items()]
            rows.append(
                _rows(package["description"].rstrip("."), folder / "scenario.mjs", packages, package["works"])
            )
    return START + "".join(sorted(rows, key=str.lower))


def _rows(client: str, program: Path, packages: list[str], steps: list[str]) -> str:
    """Lines with a package and a step each; the client is in the first one."""
    link = f"[{client}](../{program.relative_to(PAGE.parents[1]).as_posix()})"
    lines = itertools.zip_longest([link], [f"`{package}`" for package in packages], steps, fillvalue="")
    return "".join(f"| {name} | {package} | {step} |\n" for name, package, step in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
