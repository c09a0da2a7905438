"""The settings of proxies in deploy/ are those that docs/proxies.md explains, and fit the frontend."""

from __future__ import annotations

import re

import pytest

from frontend_svc.config import FrontendConfig
from frontend_svc.protocols.openai.connection import ConnectionLimits
from tests.architecture.sources import ROOT

FILES = {"nginx": "nginx.conf", "HAProxy": "haproxy.cfg"}
GUIDE = (ROOT / "docs" / "proxies.md").read_text()


def settings_of(proxy: str) -> list[tuple[str, str]]:
    """The name and the value of each setting of a table of the guide."""
    table = GUIDE.split(f"| {proxy} | default |")[1].split("\n\n")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    return [(name, row[3].strip()) for row in rows for name in re.findall(r"`([^`]+)`", row[1])]


def text_of(proxy: str) -> str:
    lines = (ROOT / "deploy" / FILES[proxy]).read_text().splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


@pytest.mark.parametrize("proxy", FILES)
def test_every_setting_that_is_explained_has_the_value_of_the_guide(proxy: str) -> None:
    settings, text = settings_of(proxy), text_of(proxy)
    assert len(settings) > 8
    for name, value in settings:
        written = name if value in ("set", "unset") else f"{name} {value}"
        assert bool(re.search(rf"\b{re.escape(written)}\b", text)) == (value != "unset"), name


def test_a_proxy_closes_idle_connections_before_a_frontend_does() -> None:
    nginx = re.search(r"upstream frontends_http {.*?keepalive_timeout (\d+)s", text_of("nginx"), re.DOTALL)
    haproxy = re.findall(r"pool-purge-delay (\d+)s", text_of("HAProxy"))
    assert nginx is not None
    assert len(haproxy) == 2
    assert all(float(limit_s) < ConnectionLimits().idle_s for limit_s in (nginx[1], *haproxy))


def test_heartbeats_come_twice_in_the_usual_idle_limit() -> None:
    assert 0 < FrontendConfig(engine=("127.0.0.1:50061",)).http_heartbeat_s <= 30 / 2


@pytest.mark.parametrize("proxy", FILES)
def test_both_proxies_choose_a_frontend_by_the_id_of_the_request(proxy: str) -> None:
    assert re.search(r"http_x_request_id|hdr\(x-request-id\)", text_of(proxy))
