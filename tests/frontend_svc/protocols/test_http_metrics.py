"""Calls of the HTTP API are counted by route, and nothing of what clients send is a label."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.frontend_svc.protocols.test_openai import CHAT, HTTPClient, served


async def samples(client: HTTPClient, name: str) -> dict[tuple[str, ...], float]:
    page = (await client.call("GET", "/metrics")).content.decode()
    return {
        tuple(sample.labels.get(label, "") for label in ("handler", "method", "status")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }


async def test_calls_are_counted_by_route_method_and_class_of_status():
    async with served() as client:
        await client.post("/v1/chat/completions", CHAT)
        await client.post("/v1/chat/completions", {**CHAT, "stream": True})
        await client.post("/v1/chat/completions", {})
        await client.call("GET", "/v1/models/a-name-of-the-client")
        await client.call("GET", "/wp-admin/setup.php")
        await client.call("BREW", "/v1/models")
        await client.call("GET", "/health")
        counted = await samples(client, "triptych_frontend_http_requests_total")
        assert counted == {
            ("/v1/chat/completions", "POST", "2xx"): 2,
            ("/v1/chat/completions", "POST", "4xx"): 1,
            ("/v1/models/{model:path}", "GET", "4xx"): 1,
            ("none", "GET", "4xx"): 1,
            ("/v1/models", "OTHER", "4xx"): 1,
        }
        assert await samples(client, "http_requests_total") == counted
        times = await samples(client, "http_request_duration_seconds_count")
        assert times["/v1/chat/completions", "POST", ""] == 3
