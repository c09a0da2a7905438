"""Measure one thing: python -m benchmarks SCENARIO [options].

Prints the scenario's tables; `--json FILE` writes them with the command, the settings, the commit and the
machine; a file of `benchmarks/results/` needs an unchanged tree. `python -m benchmarks.plot FILE PICTURE`
draws them. The exit code is 1 where a promise of the scenario is not kept.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast

from benchmarks import scenarios
from benchmarks.report import Report, print_tables, report_file

# These need torch alone: a machine with a GPU runs them from a bare checkout.
_BARE = ("gpu", "kernels")


class Scenario(Protocol):
    """The interface of a module of `benchmarks.scenarios` and `tests.acceptance.scenarios`."""

    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Report]


def main(words: Sequence[str] | None = None) -> int:
    return run_scenario(scenarios, "python -m benchmarks", __doc__ or "", words)


def run_scenario(package: ModuleType, prog: str, help_text: str, words: Sequence[str] | None = None) -> int:
    """Run a scenario of the package with its options, or list them; returns the exit code."""
    name, *rest = list(sys.argv[1:] if words is None else words) or ["--help"]
    names = scenario_names(package)
    if name not in names:
        is_help = name in ("-h", "--help")
        print(
            _listing(package, help_text) if is_help else f"there is no scenario {name!r}: {', '.join(names)}"
        )
        return 0 if is_help else 2
    if name not in _BARE:
        from triptych_kit.process.setup import prepare_process

        prepare_process("client")
    module = importlib.import_module(f"{package.__name__}.{name}")
    scenario = cast(Scenario, module)
    parser = argparse.ArgumentParser(
        prog=f"{prog} {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=report_file, help="file for the report")
    scenario.add_options(parser)
    options = parser.parse_args(rest)
    report = scenario.run(options)
    print_tables(report.rows)
    if options.json is not None:
        report.write(options.json, shlex.join((*prog.split(), name, *rest)))
    for shortfall in report.shortfalls:
        print(f"NOT KEPT {shortfall}")
    return 1 if report.shortfalls else 0


def scenario_names(package: ModuleType = scenarios) -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def _listing(package: ModuleType, help_text: str) -> str:
    names = scenario_names(package)
    width = max(map(len, names))
    return "\n".join(
        [help_text.strip(), "", *(f"  {name:{width}}  {_summary(package, name)}" for name in names)]
    )


def _summary(package: ModuleType, name: str) -> str:
    """The first line of a scenario's docstring, without importing what it needs."""
    folder = Path(package.__path__[0])
    file = folder / f"{name}.py" if (folder / f"{name}.py").exists() else folder / name / "__init__.py"
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
