"""Writes the tables of docs/metrics.md: `python tools/metrics_doc.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from coordinator_svc.membership.registry import EngineRegistry
from coordinator_svc.membership.topology import Topology
from coordinator_svc.metrics import coordinator_metrics
from coordinator_svc.scaling.scaling import Scaling
from engine_svc.admin.metrics import register_engine
from engine_svc.build.engine import build_served_engine
from engine_svc.build.features import scheduler_features
from engine_svc.cache.attention import FullAttention
from engine_svc.cache.config import CacheConfig
from engine_svc.config import EngineConfig
from engine_svc.scheduler.config import SchedulerConfig
from engine_svc.scheduler.feature import SchedulerContext
from engine_svc.session.servicer import EngineCoreServicer
from frontend_svc.build import build_frontend
from frontend_svc.config import FrontendConfig
from triptych_cli.services import embedded_model
from triptych_kit.clock import FakeClock
from triptych_kit.security.listeners import OPEN_LISTENERS
from triptych_kit.telemetry.metrics import Family, Metrics

FILE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
_TABLES = "<!-- What follows is written by tools/metrics_doc.py. -->"


async def registered() -> dict[str, Metrics]:
    """The metrics of each service, with nothing counted."""
    clock = FakeClock()
    registry = EngineRegistry(clock, lease_s=3.0)
    coordinator = coordinator_metrics(registry, Topology(registry, coordinator_epoch=1), Scaling())
    config = EngineConfig(
        str(embedded_model()), served_model_name="NAME", kv_cache_metrics=True, scheduling_policy="continuum"
    )
    engine = build_served_engine(config)
    engine.shares_experts = True  # for the metrics of lockstep
    register_engine(engine.metrics, engine, EngineCoreServicer(engine))
    OPEN_LISTENERS.register(engine.metrics, "engine")
    OPEN_LISTENERS.register(coordinator, "coordinator")
    configs = SchedulerConfig(64), CacheConfig(10, (FullAttention(4),))
    scheduler_features(config, SchedulerContext(clock, lambda work: None, *configs, engine.metrics))
    frontend = build_frontend(FrontendConfig(engine=("127.0.0.1:1",)))
    await frontend.close()
    return {"frontend": frontend.metrics, "engine": engine.metrics, "coordinator": coordinator}


async def generated(document: str) -> str:
    """The document with its tables replaced; what is before them stays."""
    return "\n".join((document.partition(_TABLES)[0] + _TABLES, "", *_tables(await registered())))


def _tables(services: dict[str, Metrics]) -> Iterator[str]:
    for service, metrics in services.items():
        families = metrics.families.values()
        fixed = ", ".join(f"`{name}`" for name in metrics.labels)
        yield f"## {service.capitalize()}\n"
        if fixed:
            yield f"All have the labels {fixed}.\n"
        yield "| metric | type | labels | meaning |\n|---|---|---|---|"
        yield from map(_row, families)
        yield ""
    yield "## Buckets\n"
    yield "Upper bounds; one above all is added.\n\n| metric | buckets |\n|---|---|"
    for metrics in services.values():
        for family in metrics.families.values():
            if family.buckets:
                yield f"| `{family.name}` | {' '.join(f'{bound:g}' for bound in family.buckets)} |"
    yield "\n## Names of vLLM\n"
    yield "| alias | metric |\n|---|---|"
    for metrics in services.values():
        for family in metrics.families.values():
            yield from (f"| `{alias}` | `{family.name}` |" for alias in family.aliases)
    yield ""


def _row(family: Family) -> str:
    # Those of the conventions are the same for all, and the text names them.
    own = () if family.convention is not None else family.labels
    labels = ", ".join(f"`{name}`" for name in own)
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help} |"


if __name__ == "__main__":
    FILE.write_text(asyncio.run(generated(FILE.read_text(encoding="utf-8"))), encoding="utf-8")
