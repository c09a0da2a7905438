"""The dashboards of Grafana: written by their tool, complete, and of the form that Grafana publishes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.compose.files import GPU_FILE, read
from tools.dashboards import DASHBOARDS, FOLDER, written

names = pytest.mark.parametrize("name", DASHBOARDS)


def _panels(name: str) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(written(name))["panels"] if panel["type"] != "row"]


@names
def test_the_file_is_up_to_date(name: str) -> None:
    assert (FOLDER / f"{name}.json").read_text() == written(name), "run python tools/dashboards.py"
    assert sorted(file.stem for file in FOLDER.iterdir()) == sorted(DASHBOARDS)


@names
def test_every_panel_says_what_it_shows(name: str) -> None:
    panels = _panels(name)
    assert len({panel["title"] for panel in panels}) == len(panels) > 10
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["description"].endswith(".")
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert {source["uid"] for source in sources} == {"${datasource}"}
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])


def test_operators_begin_with_numbers_and_have_heat_maps_and_choices() -> None:
    first, *_ = board = _panels("operators")
    numbers = [panel["title"] for panel in board if panel["gridPos"]["y"] == first["gridPos"]["y"]]
    assert numbers == [panel["title"] for panel in board if panel["type"] == "stat"]
    assert len(numbers) == 6
    heat_maps = [panel for panel in board if panel["type"] == "heatmap"]
    assert [panel["title"] for panel in heat_maps] == ["Times to first token", "Times per output token"]
    assert {target["format"] for panel in heat_maps for target in panel["targets"]} == {"heatmap"}
    for name in DASHBOARDS:
        variables = json.loads(written(name))["templating"]["list"]
        assert [one["name"] for one in variables] == ["datasource", "model", "instance"]


@names
def test_no_panel_covers_another(name: str) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads(written(name))["panels"]:
        area = panel["gridPos"]
        assert area["x"] + area["w"] <= 24
        for x in range(area["x"], area["x"] + area["w"]):
            for y in range(area["y"], area["y"] + area["h"]):
                assert (x, y) not in cells
                cells.add((x, y))


_CHECK = """
import type { Dashboard } from '@grafana/schema';
import type * as timeseries from
  '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen';
import type * as heatmap from
  '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen';
// JSON has the values of enumerations.
type Plain<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
"""


@pytest.mark.network
@names
def test_it_has_the_types_that_this_release_of_grafana_publishes(name: str, tmp_path: Path) -> None:
    release = read(GPU_FILE)["services"]["grafana"]["image"].partition(":")[2]
    npm = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--ignore-scripts"]
    packages = [f"@grafana/schema@{release}", "typescript@5.7"]
    subprocess.run([*npm, *packages], cwd=tmp_path, check=True, timeout=300)
    board = json.loads(written(name))
    right = [_CHECK, _constant("board", "Dashboard", board)]
    for panel in _panels(name):
        kind, custom = panel["type"], panel["fieldConfig"]["defaults"].get("custom")
        right.append(_constant(f"options{panel['id']}", f"{kind}.Options", panel["options"]))
        if custom is not None:
            right.append(_constant(f"custom{panel['id']}", f"{kind}.FieldConfig", custom))
    (tmp_path / "right.ts").write_text("\n".join(right))
    wrong = {**board, "refrsh": "5s"}
    (tmp_path / "wrong.ts").write_text("\n".join((_CHECK, _constant("board", "Dashboard", wrong))))
    assert _compile(tmp_path, "right.ts") == ""
    assert '"refrsh"' in _compile(tmp_path, "wrong.ts")


def _constant(name: str, kind: str, value: object) -> str:
    return f"export const {name}: Plain<{kind}> = {json.dumps(value)};"


def _compile(folder: Path, file: str) -> str:
    flags = ["--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "node", "--target", "es2022"]
    command = ["node_modules/.bin/tsc", *flags, file]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120).stdout
