"""Time to the first token of a stack that `triptych serve` runs, one request at a time.

python first_token.py MODEL NUM_REQUESTS

Medians of requests without a constraint, with a schema that the engine has compiled already, with a schema of
1 KB that it has not seen, and with one of 12 KB that it has not seen. The kinds take turns.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import grpc

from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2

_PROMPT_TOKENS = 16
_WARM_UP = 5
_NUM_LARGE = 16
_READY_WITHIN_S = 60.0
_STOPPED_WITHIN_S = 20.0
_FIRST_ID, _END_ID = 300, 2_000


def main() -> None:
    model, num_requests = sys.argv[1], int(sys.argv[2])
    scripts = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["triptych"].partition(":")
    with tempfile.TemporaryDirectory() as folder:
        ready_file, log_file = Path(folder, "ready.json"), Path(folder, "log")
        command = [sys.executable, "-c", f"from {module} import {function}; {function}()", "serve", model]
        flags = [
            "--port=0",
            "--http-port=0",
            f"--ready-file={ready_file}",
            "--num-threads=1",
            "--kv-cache-memory=512M",
        ]
        with log_file.open("wb") as log:
            process = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + _READY_WITHIN_S
            while not ready_file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the stack did not get ready:\n{log_file.read_text()}")
                time.sleep(0.02)
            address = json.loads(ready_file.read_text(encoding="utf-8"))["grpc"]
            metrics = _first_token_metrics(address, num_requests)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOPPED_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
    print(json.dumps(metrics))


def _first_token_metrics(address: str, num_requests: int) -> dict[str, float]:
    choose = random.Random(1)
    times: dict[str, list[float]] = {}
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for index in range(_WARM_UP + num_requests):
            schemas = {
                "first_token_ms": "",
                "cached_schema_ms": _schema(0, 1),
                "new_schema_ms": _schema(1 + index, 1),
                "new_large_schema_ms": _schema(1 + index, _NUM_LARGE),
            }
            for metric, schema in schemas.items():
                ids = [choose.randrange(_FIRST_ID, _END_ID) for _ in range(_PROMPT_TOKENS)]
                sampling = sampling_pb2.SamplingParams(temperature=0.0, max_tokens=2)
                if schema:
                    sampling.structured_output.json_schema = schema
                else:
                    sampling.ignore_eos = True
                request = generate_pb2.GenerateRequest(
                    token_ids=generate_pb2.TokenIds(ids=ids), sampling=sampling
                )
                times.setdefault(metric, []).append(_first_token_s(stub, request))
    return {metric: 1e3 * statistics.median(values[_WARM_UP:]) for metric, values in times.items()}


def _first_token_s(
    stub: inference_pb2_grpc.InferenceServiceStub, request: generate_pb2.GenerateRequest
) -> float:
    started_at = time.perf_counter()
    first_at = None
    for response in stub.Generate(request):
        if first_at is None and response.delta.token_ids:
            first_at = time.perf_counter()
    if first_at is None:
        raise SystemExit("a stream ended without a token")
    return first_at - started_at


def _schema(index: int, num_invoices: int) -> str:
    """An object of invoices, each of the usual size; another text for each index."""
    text = {"type": "string", "maxLength": 40}
    line = _object({"article": text, "count": {"type": "integer"}, "price": {"type": "number"}})
    invoice = {
        "status": {"enum": ["open", "paid", "late"]},
        "lines": {"type": "array", "items": line, "minItems": 1, "maxItems": 20},
        "note": {"anyOf": [text, {"type": "null"}]},
    }
    names = [f"invoice_{index}_{number}" for number in range(num_invoices)]
    return json.dumps(_object({name: _object({f"customer_{name}": text, **invoice}) for name in names}))


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


if __name__ == "__main__":
    main()
