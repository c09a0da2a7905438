"""The parts of the simulation: each a scenario or some, and the figures that are read off it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.cluster_sim_scenario import Scenario
from benchmarks.cluster_sim_time import Agenda, VirtualLoop
from benchmarks.cluster_sim_world import Cluster
from benchmarks.report import Row

POLICIES = ("round-robin", "load", "kv-aware", "p2c", "prefix-affinity")
# Requests of the last seconds may still wait for their first token when a scenario ends.
_TAIL_S = 2.0
_SMOOTHED_SAMPLES = 10  # a second of them: the maximum of one moment says little
_BACK_WITHIN = 1.1


def simulate(scenario: Scenario) -> tuple[Cluster, float]:
    """Let a scenario pass; returns what became of it and the seconds that took."""
    agenda = Agenda(time.thread_time) if scenario.on_wire else Agenda()
    loop = VirtualLoop(agenda)
    cluster = Cluster(scenario, agenda)
    began = time.perf_counter()
    try:
        loop.run_until_complete(cluster.run())
    finally:
        loop.close()
    return cluster, time.perf_counter() - began


def publish(sizes: Sequence[tuple[int, int]]) -> Iterator[Row]:
    """What publishing costs the coordinator and a frontend when every load changes ten times a second."""
    for num_engines, num_frontends in sizes:
        # Enough for a figure, and no longer than a minute for all sizes together.
        end_s = 1.5 + min(8.0, 300_000 / (num_engines * num_frontends))
        cluster, wall_s = simulate(
            Scenario(
                num_engines,
                num_frontends,
                end_s=end_s,
                warm_s=1.5,
                with_requests=False,
                on_wire=True,
                loads_from="coordinator",
            )
        )
        cost, first = cluster.cost, cluster.frontends[0]
        ages = sorted(age for at_s, age in cluster.observed.ages_s if at_s > 1.5)
        yield {
            "part": "publish",
            "engines": num_engines,
            "frontends": num_frontends,
            "coordinator_cpu_ms_per_s": 1000 * cost.cpu_s / cost.seconds,
            "reports_per_s": cost.num_reports / cost.seconds,
            "report_bytes": cost.reported_bytes / cost.num_reports,
            "messages_per_s": cost.num_published / cost.seconds,
            "message_bytes": cost.published_bytes / cost.num_published,
            "frontend_kb_per_s": cost.published_bytes / cost.seconds / num_frontends / 1000,
            "total_mb_per_s": cost.published_bytes / cost.seconds / 1e6,
            "frontend_cpu_ms_per_message": 1000 * first.take_s / first.num_taken,
            "age_p50_ms": 1000 * _quantile(ages, 0.5),
            "age_p99_ms": 1000 * _quantile(ages, 0.99),
            "wall_s": wall_s,
        }


def route(scenario: Scenario, policies: Sequence[str], part: str = "route") -> Iterator[Row]:
    """How well each policy spreads the same requests."""
    for policy in policies:
        cluster, wall_s = simulate(replace(scenario, policy=policy))
        seen = spread(cluster, scenario, policy)
        yield {"part": part, "loads_from": scenario.loads_from, **seen, "wall_s": wall_s}


def sources(scenario: Scenario, policies: Sequence[str]) -> Iterator[Row]:
    """The same where frontends hear of loads only from the coordinator, or only over engines' streams."""
    for loads_from in ("coordinator", "streams"):
        yield from route(replace(scenario, loads_from=loads_from), policies, "sources")


def spread(cluster: Cluster, scenario: Scenario, policy: str) -> dict[str, str | int | float | None]:
    """Times to the first token, imbalance, hits, ages and the cost of a choice, after the warm-up."""
    observed = cluster.observed
    requests = [
        request
        for request in observed.requests
        if scenario.warm_s <= request.arrived_at < scenario.end_s - _TAIL_S
    ]
    # One that has no token yet is at least as late as this.
    waits = [
        (request, (request.first_token_at or scenario.end_s) - request.arrived_at) for request in requests
    ]
    firsts = sorted(wait for _, wait in waits)
    queued = sorted(
        wait - scenario.engine.prompt_token_s * request.num_prompt_tokens
        for request, wait in waits
        if request.num_hit_tokens == 0
    )
    ages = sorted(age for at_s, age in observed.ages_s if at_s >= scenario.warm_s)
    num_prefix = sum(place.queue.num_prefix_tokens for place in cluster.places)
    return {
        "engines": scenario.num_engines,
        "frontends": scenario.num_frontends,
        "policy": policy,
        "requests_per_s": cluster.requests_per_s,
        "first_token_p50_ms": 1000 * _quantile(firsts, 0.5),
        "first_token_p99_ms": 1000 * _quantile(firsts, 0.99),
        "queued_p99_ms": 1000 * _quantile(queued, 0.99),
        "imbalance": imbalance(cluster, scenario.warm_s, scenario.end_s),
        "hit_rate": sum(place.queue.num_hit_tokens for place in cluster.places) / max(1, num_prefix),
        "age_p50_ms": 1000 * _quantile(ages, 0.5),
        "age_p99_ms": 1000 * _quantile(ages, 0.99),
        "num_without_token": sum(request.first_token_at is None for request in requests),
    }


def loss(scenario: Scenario) -> Iterator[Row]:
    """A tenth of the engines is lost at once, silently and then with broken streams."""
    assert scenario.lose_at_s is not None, "a scenario without a loss"
    for is_cut_off in (True, False):
        tried = replace(scenario, is_cut_off=is_cut_off)
        cluster, wall_s = simulate(tried)
        observed = cluster.observed
        lost_at = scenario.lose_at_s
        before = imbalance(cluster, scenario.warm_s, lost_at)
        last = observed.last_pick_of_lost_at
        back_at = _back_at(cluster, lost_at, _BACK_WITHIN * before)
        yield {
            "part": "loss",
            "engines": scenario.num_engines,
            "frontends": scenario.num_frontends,
            "policy": scenario.policy,
            "how": "silent" if is_cut_off else "stream broken",
            "num_moved": observed.num_moves,
            "num_picks_of_lost": observed.num_picks_of_lost,
            "last_pick_of_lost_after_s": 0.0 if last is None else last - lost_at,
            "imbalance_before": before,
            "imbalance_worst": max(_smoothed(cluster, lost_at, scenario.end_s), default=0.0),
            "balanced_after_s": None if back_at is None else back_at - lost_at,
            "timeline": _timeline(cluster),
            "wall_s": wall_s,
        }


def outage(scenario: Scenario) -> Iterator[Row]:
    """The coordinator is away for a while, once with and once without the engines' own streams."""
    assert scenario.outage_at_s is not None, "a scenario without an outage"
    for loads_from in ("both", "coordinator"):
        tried = replace(scenario, loads_from=loads_from)
        cluster, wall_s = simulate(tried)
        began, ended = scenario.outage_at_s, scenario.outage_at_s + scenario.outage_s
        before, during = imbalance(cluster, scenario.warm_s, began), imbalance(cluster, began, ended)
        ages = sorted(age for at_s, age in cluster.observed.ages_s if began <= at_s < ended)
        yield {
            "part": "outage",
            "engines": scenario.num_engines,
            "frontends": scenario.num_frontends,
            "policy": scenario.policy,
            "loads_from": loads_from,
            "imbalance_before": before,
            "imbalance_during": during,
            "worsened": during / before,
            "imbalance_after": imbalance(cluster, ended + 1.0, scenario.end_s),
            "first_token_p99_before_ms": 1000 * _first_p99(cluster, scenario.warm_s, began),
            "first_token_p99_during_ms": 1000 * _first_p99(cluster, began, ended),
            "age_p99_during_ms": 1000 * _quantile(ages, 0.99),
            "timeline": _timeline(cluster),
            "wall_s": wall_s,
        }


def imbalance(cluster: Cluster, from_s: float, to_s: float) -> float:
    """The busiest engine's requests by the mean of all, on average over the time between."""
    ratios = [
        top / mean for at_s, top, mean in cluster.observed.samples if from_s <= at_s < to_s and mean > 0
    ]
    return sum(ratios) / max(1, len(ratios))


def _smoothed(cluster: Cluster, from_s: float, to_s: float) -> list[float]:
    inside = [
        (top / mean) for at_s, top, mean in cluster.observed.samples if from_s <= at_s < to_s and mean > 0
    ]
    return [
        sum(inside[place : place + _SMOOTHED_SAMPLES]) / _SMOOTHED_SAMPLES
        for place in range(len(inside) - _SMOOTHED_SAMPLES + 1)
    ]


def _back_at(cluster: Cluster, lost_at: float, limit: float) -> float | None:
    """When the second began from which on the imbalance stayed within `limit`; None if it never did."""
    times = [at_s for at_s, _, _ in cluster.observed.samples if at_s >= lost_at]
    smoothed = _smoothed(cluster, lost_at, float("inf"))
    beyond = [place for place, ratio in enumerate(smoothed) if ratio > limit]
    if not beyond:
        return lost_at
    return times[beyond[-1] + 1] if beyond[-1] + 1 < len(smoothed) else None


def _timeline(cluster: Cluster) -> list[float]:
    """The imbalance at each sample, for the plot."""
    return [round(top / max(mean, 1e-9), 3) for _, top, mean in cluster.observed.samples]


def _first_p99(cluster: Cluster, from_s: float, to_s: float) -> float:
    firsts = sorted(
        request.first_token_at - request.arrived_at
        for request in cluster.observed.requests
        if from_s <= request.arrived_at < to_s and request.first_token_at is not None
    )
    return _quantile(firsts, 0.99)


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0
