"""What the endpoint picker of the Gateway API inference extension reads of a pod of a frontend and an engine.

The rules are those of its model server protocol (proposal 003) and of the extractor of llm-d's picker: vLLM's
names, the first series of each, integers in the labels of the cache.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.rig.processes import Fleet, ServicePlan
from triptych_cli.services import embedded_model

LIMIT_S = 60
GAUGES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc")
CACHE, ADAPTERS = "vllm:cache_config_info", "vllm:lora_requests_info"


def scrape(address: str) -> dict[str, list]:
    """The series of each metric."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
        return {
            family.name: family.samples for family in text_string_to_metric_families(answer.read().decode())
        }


async def test_a_picker_finds_each_value_once_at_the_engine_and_not_at_the_frontend(tmp_path):
    async with Fleet(tmp_path) as fleet:
        flags = (str(embedded_model()), "--num-threads=1", "--num-kv-blocks=64", "--block-size=16")
        engine = fleet.add(ServicePlan("engine", 0, flags))
        flags = (f"--engine={engine.address}", "--http-port=0", "--text-workers=1")
        frontend = fleet.add(ServicePlan("frontend", 0, flags))
        await fleet.start()
        await fleet.until_routed()
        idle = await asyncio.to_thread(scrape, engine.admin_http)
        connection = http.client.HTTPConnection(frontend.http, timeout=LIMIT_S)
        body = json.dumps({"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True})
        connection.request("POST", "/v1/completions", body)
        response = await asyncio.to_thread(connection.getresponse)
        await asyncio.to_thread(response.readline)
        busy = await asyncio.to_thread(scrape, engine.admin_http)
        connection.close()
        at_frontend = await asyncio.to_thread(scrape, frontend.admin_http)
    for seen in (idle, busy):
        # One engine an endpoint: a picker takes only one series of each.
        assert {name: len(seen[name]) for name in (*GAUGES, CACHE)} == dict.fromkeys((*GAUGES, CACHE), 1)
        (cache,) = seen[CACHE]
        assert (int(cache.labels["block_size"]), int(cache.labels["num_gpu_blocks"])) == (16, 64)
        assert len({sample.labels["engine"] for name in GAUGES for sample in seen[name]}) == 1
        # There are no adapters yet; vLLM has it only where adapters are enabled, either.
        assert ADAPTERS not in seen
    assert [idle[name][0].value for name in GAUGES] == [0, 0, 0]
    waiting, running, usage = (busy[name][0].value for name in GAUGES)
    assert (waiting, running) == (0, 1)
    assert 0 < usage <= 1
    assert not {*GAUGES, CACHE} & set(at_frontend)
