"""docs/clients.md, from the requirements and the steps that scenarios of clients declare.

python -m tests.system.clients_table
"""

from __future__ import annotations

import ast
from pathlib import Path

FOLDER = Path(__file__).with_name("clients")
PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
START = """# Clients that `make test-network` runs

Each client is unmodified, in an environment of its own, against a frontend with the embedded model.
The table is made by `python -m tests.system.clients_table`; the programs are in `tests/system/clients`.

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


def page() -> str:
    rows = []
    for scenario in scenarios():
        text = scenario.read_text()
        packages = ast.literal_eval(text.partition("# dependencies = ")[2].partition("\n")[0])
        title = (ast.get_docstring(ast.parse(text)) or "").rstrip(".")
        names = "<br>".join(f"`{package}`" for package in packages)
        rows.append(f"| {title} | {names} | {'<br>'.join(steps_of(scenario))} |\n")
    return START + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page())
