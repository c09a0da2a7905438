"""Runs cases and reports what they found, by section, as text or as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

from triptych_conformance.cases import Case, Finding, NotApplicable, PeerT, Turn


class Outcome(Enum):
    """How a case ended."""

    KEPT = "ok"
    FINDING = "FINDING"
    WARNING = "warning"
    NOT_APPLICABLE = "-"


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one case. detail: expected and seen, or why it does not apply."""

    name: str
    section: str
    level: str
    rule: str
    outcome: Outcome
    detail: str
    duration_s: float


@dataclass(slots=True)
class Report:
    """The results of a run. peer: what was checked, in one line."""

    peer: str
    results: list[Result] = field(default_factory=list)
    duration_s: float = 0.0

    def with_outcome(self, outcome: Outcome) -> list[Result]:
        return [result for result in self.results if result.outcome is outcome]

    @property
    def has_findings(self) -> bool:
        return bool(self.with_outcome(Outcome.FINDING))

    def as_text(self) -> str:
        """A line for each case below its section, the detail below it, and a line of totals."""
        lines = [self.peer]
        for section, results in groupby(self.results, key=lambda result: result.section):
            lines.append(f"\n{section}")
            for result in results:
                lines.append(f"  {result.outcome.value:8} {result.level:7} {result.name}: {result.rule}")
                lines += [f"           {result.detail}"] if result.detail else []
        totals = ", ".join(f"{len(self.with_outcome(outcome))} {outcome.name.lower()}" for outcome in Outcome)
        return "\n".join([*lines, "", f"{totals.replace('_', ' ')}, {self.duration_s:.1f} s"])

    def as_json(self) -> str:
        """One object with the same content."""
        cases = [
            {
                "section": result.section,
                "name": result.name,
                "level": result.level,
                "rule": result.rule,
                "outcome": result.outcome.name,
                "detail": result.detail,
                "duration_s": round(result.duration_s, 3),
            }
            for result in self.results
        ]
        totals = {outcome.name: len(self.with_outcome(outcome)) for outcome in Outcome}
        content = {
            "peer": self.peer,
            "duration_s": round(self.duration_s, 3),
            "totals": totals,
            "cases": cases,
        }
        return json.dumps(content, indent=1)


async def run_cases(
    cases: Sequence[Case[PeerT]],
    check: Callable[[Case[PeerT]], Awaitable[None]],
    *,
    peer: str,
    on_result: Callable[[Result], object] = lambda result: None,
) -> Report:
    """Run `check` for each case, in the turn that the case names; the report is in the order of `cases`."""
    started_at = time.monotonic()
    results: dict[str, Result] = {}

    async def run(some: Iterable[Case[PeerT]]) -> None:
        for case in some:
            results[case.name] = await _result_of(case, check)
            on_result(results[case.name])

    async with asyncio.TaskGroup() as group:
        for case in cases:
            if case.turn is Turn.BESIDE_OTHERS:
                group.create_task(run([case]))
        await run(case for case in cases if case.turn is Turn.IN_ORDER)
    await run(case for case in cases if case.turn is Turn.LAST)
    ordered = [results[case.name] for case in cases]
    return Report(peer, ordered, time.monotonic() - started_at)


async def _result_of(case: Case[PeerT], check: Callable[[Case[PeerT]], Awaitable[None]]) -> Result:
    started_at = time.monotonic()
    outcome, detail = Outcome.KEPT, ""
    try:
        await check(case)
    except NotApplicable as reason:
        outcome, detail = Outcome.NOT_APPLICABLE, str(reason)
    except Finding as finding:
        outcome, detail = (Outcome.FINDING if case.is_must else Outcome.WARNING), str(finding)
    except Exception as error:  # noqa: BLE001  The other cases are run all the same.
        outcome, detail = Outcome.FINDING, f"the check failed: {type(error).__name__}: {error}"
    level = "MUST" if case.is_must else "SHOULD"
    duration_s = time.monotonic() - started_at
    return Result(case.name, case.section.value, level, case.rule, outcome, detail, duration_s)
