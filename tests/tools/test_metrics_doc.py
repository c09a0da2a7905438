"""The document of the metrics, and the rules for their names."""

from __future__ import annotations

import re
import subprocess

import pytest

from tools.metrics_doc import FILE, generated, registered
from triptych_kit.telemetry.metrics import to_text

# The prefix of OpenTelemetry's GenAI conventions too.
OF_EVERY_SERVICE = ("triptych_build_info", "triptych_spans_", "gen_ai_")


async def test_the_document_is_up_to_date():
    document = FILE.read_text(encoding="utf-8")
    assert await generated(document) == document, "run python tools/metrics_doc.py"


async def test_names_follow_the_rules_of_prometheus():
    for service, metrics in (await registered()).items():
        for family in metrics.families.values():
            assert family.name.startswith((f"triptych_{service}_", *OF_EVERY_SERVICE)), family.name
            assert family.name.endswith("_total") == (family.kind == "counter"), family.name
            assert not re.search(r"_(ms|us|s|mib|kb)(_|$)", family.name), family.name
            assert family.help.endswith("."), family.name
            assert list(family.buckets) == sorted(family.buckets)
            assert all(alias.startswith(("vllm:", "http_")) for alias in family.aliases)


@pytest.mark.usefixtures("prometheus_package")
async def test_promtool_finds_nothing_but_the_colons_of_aliases():
    for metrics in (await registered()).values():
        text = to_text(metrics.collect(with_aliases=False))
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


async def test_every_metric_is_there_before_anything_has_happened():
    for metrics in (await registered()).values():
        text = to_text(metrics.collect()).decode()
        for family in metrics.families.values():
            for name in (family.name, *family.aliases):
                assert f"# TYPE {name} {family.kind}" in text
