"""Verdicts in figures and in words: how many mutants were noticed, by kind and file, and which were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.mutation.copied_tree import ROOT, Stages, Verdict
from tests.mutation.worker import TIME_LIMIT


def make_report(verdicts: Sequence[Verdict], stages: Stages) -> dict[str, Any]:
    """Figures by outcome, kind, file and stage, and the survivors with their diffs."""
    num_killed = sum(verdict.is_killed for verdict in verdicts)
    return {
        "num_mutants": len(verdicts),
        "num_killed": num_killed,
        "num_killed_by_time_limit": sum(verdict.outcome == TIME_LIMIT for verdict in verdicts),
        "killed_share": num_killed / max(1, len(verdicts)),
        "by_kind": _counts([(verdict.mutant.kind.value, verdict.is_killed) for verdict in verdicts]),
        "by_file": _counts([(verdict.mutant.path, verdict.is_killed) for verdict in verdicts]),
        "by_stage": [
            {"tests": list(paths), "killed": sum(verdict.stage == stage for verdict in verdicts)}
            for stage, paths in enumerate(stages)
        ],
        "survivors": [_described(verdict) for verdict in verdicts if not verdict.is_killed],
    }


def print_report(report: dict[str, Any]) -> None:
    """The survivors, then the figures."""
    for survivor in report["survivors"]:
        print(f"\nsurvived: {survivor['path']}:{survivor['line']} {survivor['kind']}\n{survivor['diff']}")
    for part in (report["by_kind"], report["by_file"]):
        print()
        for name, counts in part.items():
            print(f"{counts['killed']:4} of {counts['mutants']:4}  {name}")
    print()
    for stage in report["by_stage"]:
        print(f"{stage['killed']:4} killed by {' '.join(stage['tests'])}")
    print(
        f"\n{report['num_killed']} of {report['num_mutants']} mutants killed ({report['killed_share']:.1%}), "
        f"{report['num_killed_by_time_limit']} of them by the time limit"
    )


def _counts(judged: Sequence[tuple[str, bool]]) -> dict[str, dict[str, int]]:
    mutants = Counter(name for name, _ in judged)
    killed = Counter(name for name, is_killed in judged if is_killed)
    return {name: {"mutants": mutants[name], "killed": killed[name]} for name in sorted(mutants)}


def _described(verdict: Verdict) -> dict[str, Any]:
    mutant = verdict.mutant
    original = (ROOT / mutant.path).read_text(encoding="utf-8")
    return {
        "path": mutant.path,
        "line": mutant.line,
        "kind": mutant.kind.value,
        "diff": mutant.diff(original),
    }
