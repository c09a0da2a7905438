"""A cluster in virtual time: the real coordinator and routing code, simulated engines, frontends and network.

    python -m benchmarks.cluster_sim --plot cluster_sim.png        # all of it, into benchmarks/results
    python -m benchmarks.cluster_sim --parts publish               # one part; the report keeps the others
    python -m benchmarks.cluster_sim --parts route --policies p2c --sizes 100x10

Of the coordinator its servicer, registry, topology, load table, publishers and converters run as they are, on
an event loop whose clock jumps; of the frontend its topology, accounts and policies. Simulated are engines
(queues), the wire (delays of 0.2 ms and a tail) and what a frontend notices of a lost engine's stream. Where
the cost of publishing is measured, messages are serialized and parsed; gRPC itself is in no figure.
Only `publish` depends on the machine. All else is virtual and the same at each run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import cluster_sim_parts as parts
from benchmarks.cluster_sim_plot import plot
from benchmarks.cluster_sim_scenario import Scenario
from benchmarks.report import Report, Row, print_table
from frontend_svc.engines.routing.policies import DEFAULT_POLICY

_RESULTS = Path(__file__).parent / "results"
_SIZES = {
    "publish": ("10x10", "10x100", "100x10", "100x100", "1000x10", "1000x100"),
    "route": ("10x10", "100x10", "100x100", "1000x100"),
    "sources": ("100x10",),
    "loss": ("100x10", "1000x10"),
    "outage": ("100x10", "1000x10"),
}
_LONG_S, _SHORT_S = 20.0, 7.0
# The largest cluster has tens of thousands of requests in seconds.
_LARGE = 10_000
_WARM_S = 3.5  # where the figures of before are compared with those of after
_LOST_AT_S, _AFTER_LOSS_S = 5.0, 10.0
_OUTAGE_AT_S, _OUTAGE_S, _AFTER_OUTAGE_S = 5.0, 10.0, 5.0


def main(words: Sequence[str] | None = None) -> None:
    """Run the chosen parts, print their tables, and enter their figures into the report and the plot."""
    arguments = _parse(words)
    for part in arguments.parts:
        rows = _rows_of(part, arguments)
        print_table([{name: value for name, value in row.items() if name != "timeline"} for row in rows])
        merged = merge(_written(arguments.json), rows)
        Report("cluster_sim", {"seed": arguments.seed}, merged).write(arguments.json)
    if arguments.plot:
        plot(_written(arguments.json), arguments.plot)


def merge(before: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """`before` with all rows replaced that `rows` have anew."""
    held = {_key(row): row for row in before} | {_key(row): row for row in rows}
    return sorted(held.values(), key=_key)


def _rows_of(part: str, arguments: argparse.Namespace) -> list[Row]:
    sizes = [_size(word) for word in arguments.sizes or _SIZES[part]]
    if part == "publish":
        return list(parts.publish(sizes))
    rows: list[Row] = []
    for num_engines, num_frontends in sizes:
        scenario = Scenario(
            num_engines, num_frontends, policy=arguments.policy, seed=arguments.seed, end_s=_LONG_S
        )
        rows += _of_scenario(part, scenario, arguments.policies)
    return rows


def _of_scenario(part: str, scenario: Scenario, policies: Sequence[str]) -> Iterable[Row]:
    is_large = scenario.num_engines * scenario.num_frontends > _LARGE
    if part == "route":
        return parts.route(replace(scenario, end_s=_SHORT_S if is_large else _LONG_S), policies)
    if part == "sources":
        return parts.sources(scenario, policies)
    scenario = replace(scenario, warm_s=_WARM_S)
    if part == "loss":
        return parts.loss(replace(scenario, lose_at_s=_LOST_AT_S, end_s=_LOST_AT_S + _AFTER_LOSS_S))
    return parts.outage(
        replace(
            scenario,
            outage_at_s=_OUTAGE_AT_S,
            outage_s=_OUTAGE_S,
            end_s=_OUTAGE_AT_S + _OUTAGE_S + _AFTER_OUTAGE_S,
        )
    )


def _written(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def _key(row: Row) -> tuple[str, int, int, str, str, str]:
    return (
        str(row["part"]),
        int(str(row["engines"])),
        int(str(row["frontends"])),
        str(row.get("policy", "")),
        str(row.get("loads_from", "")),
        str(row.get("how", "")),
    )


def _size(word: str) -> tuple[int, int]:
    num_engines, _, num_frontends = word.partition("x")
    return int(num_engines), int(num_frontends)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(_SIZES), default=list(_SIZES))
    parser.add_argument("--sizes", nargs="+", help="ENGINESxFRONTENDS; each part has its own")
    parser.add_argument("--policies", nargs="+", default=list(parts.POLICIES), help="of route and sources")
    parser.add_argument("--policy", default=DEFAULT_POLICY, help="of loss and outage")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=_RESULTS / "cluster_sim.json", help="report to write to")
    parser.add_argument("--plot", type=Path, help="picture of the report to write; needs matplotlib")
    return parser.parse_args(words)


if __name__ == "__main__":
    main()
