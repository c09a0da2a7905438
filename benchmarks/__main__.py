"""Measure one thing: python -m benchmarks SCENARIO [options].

Prints the scenario's tables; `--json FILE` writes them with the settings, the commit and the machine, and
`python -m benchmarks.plot FILE PICTURE` draws them. The exit code is 1 where a promise of the scenario is not
kept.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

from benchmarks import scenarios
from benchmarks.report import Report, print_tables

# These need torch alone: a machine with a GPU runs them from a bare checkout.
_BARE = ("gpu", "kernels")


class Scenario(Protocol):
    """What a module of `benchmarks.scenarios` has."""

    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]


def main(words: Sequence[str] | None = None) -> int:
    name, *rest = list(sys.argv[1:] if words is None else words) or ["--help"]
    names = scenario_names()
    if name not in names:
        asked = name in ("-h", "--help")
        print(_listing(names) if asked else f"there is no scenario {name!r}: {', '.join(names)}")
        return 0 if asked else 2
    if name not in _BARE:
        from triptych_kit.process.setup import prepare_process

        prepare_process("client")
    scenario = cast(Scenario, importlib.import_module(f"{scenarios.__name__}.{name}"))
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=sys.modules[f"{scenarios.__name__}.{name}"].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="file for the report")
    scenario.add_options(parser)
    options = parser.parse_args(rest)
    report = scenario.run(options)
    print_tables(report.rows)
    if options.json is not None:
        report.write(options.json)
    for shortfall in report.shortfalls:
        print(f"NOT KEPT {shortfall}")
    return 1 if report.shortfalls else 0


def scenario_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(scenarios.__path__))


def _listing(names: Sequence[str]) -> str:
    width = max(map(len, names))
    return "\n".join(
        [(__doc__ or "").strip(), "", *(f"  {name:{width}}  {_summary(name)}" for name in names)]
    )


def _summary(name: str) -> str:
    """The first line of a scenario's docstring, without importing what it needs."""
    folder = Path(scenarios.__path__[0])
    file = folder / f"{name}.py" if (folder / f"{name}.py").exists() else folder / name / "__init__.py"
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
