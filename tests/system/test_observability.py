"""What dashboards and alerts ask for is what running services have."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.architecture.sources import ROOT
from tests.compose.files import CPU_FILE, GPU_FILE, read
from tests.promql import parse
from tests.system.generation import collect, request_of
from tests.system.stack import Stack
from tools.dashboards import DASHBOARDS
from triptych_cli.services import embedded_model
from triptych_kit.http.admin_http import read_page

_DEPLOY = ROOT / "deploy"
# Prometheus adds them to what it scrapes.
_ADDED_LABELS = {"job", "instance"}
_OWN_SERIES = {"ALERTS": {"alertname", "alertstate"}, "up": set()}
_VARIABLES = {"$__rate_interval": "1m", "$model": ".+", "$instance": ".+"}
# Made by the collector from spans; tests/architecture/test_compose_files.py compares it.
_FROM_SPANS = "triptych_duration_milliseconds_bucket"
# Registered by every coordinator, with a series for each lockstep group.
_OF_GROUPS = re.compile(r"triptych_coordinator_group_\w+")


@dataclass(slots=True)
class Served:
    """What services serve: the labels of each series by its name, and the type of each metric."""

    series: dict[str, list[Mapping[str, str]]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)


needs_promtool = pytest.mark.usefixtures("prometheus_package")


def panels() -> Iterator[tuple[str, str]]:
    """Each expression of a dashboard, for all models and instances, with where it is."""
    for name in DASHBOARDS:
        board = json.loads((_DEPLOY / "grafana" / "dashboards" / f"{name}.json").read_text())
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                expression = target["expr"]
                for variable, value in _VARIABLES.items():
                    expression = expression.replace(variable, value)
                yield f"{name}: {panel['title']}", expression


def rules() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((_DEPLOY / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """What the services of a stack serve, after a request."""
    served = Served()
    async with Stack() as stack:
        trio = await stack.start_all(str(embedded_model()), "--kv-cache-metrics")
        await collect(stack.inference(trio.frontend), request_of("Once upon a time", 4))
        for child in (trio.coordinator, trio.engine, trio.frontend):
            assert child.announcement is not None
            page = await read_page(child.announcement.admin_http, "/metrics", limit_s=10.0)
            for family in text_string_to_metric_families(page.decode()):
                served.types[family.name] = family.type
                for sample in family.samples:
                    served.series.setdefault(sample.name, []).append(sample.labels)
    yield served


@pytest.mark.asyncio(loop_scope="module")
async def test_every_metric_and_label_of_panels_and_alerts_exists(served: Served) -> None:
    wrong = []
    for where, expression in (*panels(), *rules()):
        selectors, grouped = parse(expression)
        assert selectors, expression
        known = set(_ADDED_LABELS)
        for selector in selectors:
            if selector.metric == _FROM_SPANS:
                known.add("le")
                continue
            if _OF_GROUPS.fullmatch(selector.metric):
                assert selector.metric in served.types
                continue
            known |= _OWN_SERIES.get(selector.metric, set())
            labels = served.series.get(selector.metric, [])
            known.update(*labels)
            added = dict.fromkeys(_ADDED_LABELS, "triptych")
            if selector.metric not in _OWN_SERIES and not any(
                selector.selects({**added, **one}) for one in labels
            ):
                wrong.append(f"{where}: no series {selector.metric} {selector.matchers}")
        wrong += [f"{where}: no label {name}" for name in grouped - known]
    assert wrong == []


@pytest.mark.parametrize("path", [GPU_FILE, CPU_FILE], ids=lambda path: path.name)
def test_engines_of_compose_have_the_metrics_that_panels_show(path: Path) -> None:
    for name, service in read(path)["services"].items():
        if name.startswith("engine-"):
            assert service["environment"]["TRIPTYCH_ENGINE_KV_CACHE_METRICS"] == "true"


@pytest.mark.asyncio(loop_scope="module")
async def test_panels_show_the_models_and_instances_that_are_chosen(served: Served) -> None:
    wrong = []
    for where, expression in panels():
        for selector in parse(expression)[0]:
            labels = served.series.get(selector.metric, [])
            if not labels or selector.metric in _OWN_SERIES:
                continue
            wanted = {"instance"} | {name for name in ("model_name",) if all(name in one for one in labels)}
            missing = {name for name in wanted if selector.matchers.get(name) != ("=~", ".+")}
            wrong += [f"{where}: {selector.metric} {sorted(missing)}"] if missing else []
    assert wrong == []


def test_every_alert_has_what_an_operator_needs() -> None:
    operations = (ROOT / "docs" / "operations.md").read_text().splitlines()
    sections = {line.lstrip("# ").lower() for line in operations if line.startswith("#")}
    for group in yaml.safe_load((_DEPLOY / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert set(rule["annotations"]) == {"summary", "description", "runbook"}
            document, _, section = rule["annotations"]["runbook"].partition("#")
            assert document == "docs/operations.md"
            assert section == rule["alert"].lower()
            assert section in sections


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    cases = yaml.safe_load((_DEPLOY / "alerts_test.yml").read_text())["tests"]
    fires = {case["alertname"] for test in cases for case in test["alert_rule_test"] if case["exp_alerts"]}
    assert fires == {alert for alert, _ in rules()}
    # Every test has more series than those that fire; promtool refuses an alert that is not expected.
    for test in cases:
        most = max(len(case["exp_alerts"]) for case in test["alert_rule_test"])
        instances = {tuple(sorted(_identity(series["series"]).items())) for series in test["input_series"]}
        assert len(instances) > most, test["name"]


def _identity(series: str) -> Mapping[str, str]:
    (selector,), _ = parse(series)
    return {
        name: value
        for name, (_, value) in selector.matchers.items()
        if name in ("instance", "engine", "model_name")
    }


@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("test", "rules", "alerts_test.yml"),
        ("check", "rules", "alerts.yml"),
        # The file of its key is in its container alone.
        ("check", "config", "--syntax-only", "prometheus.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=_DEPLOY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_can_read_the_expressions_of_panels(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{number}", "expr": expr} for number, (_, expr) in enumerate(panels())]
    file = tmp_path / "panels.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(
        ["promtool", "check", "rules", str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules)} rules found" in done.stdout
