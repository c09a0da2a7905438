"""Time to the first token of a stack that `triptych serve` runs, one request at a time.

python first_token.py MODEL NUM_REQUESTS
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

import grpc

from triptych.api.v1 import generate_pb2, inference_pb2_grpc
from triptych.common.v1 import sampling_pb2

_PROMPT_TOKENS = 16
_WARM_UP = 5
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
        flags = ["--port=0", f"--ready-file={ready_file}", "--num-threads=1", "--kv-cache-memory=512M"]
        with log_file.open("wb") as log:
            process = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + _READY_WITHIN_S
            while not ready_file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the stack did not get ready:\n{log_file.read_text()}")
                time.sleep(0.02)
            address = json.loads(ready_file.read_text(encoding="utf-8"))["grpc"]
            times = _first_token_times(address, num_requests)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOPPED_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
    print(json.dumps({"first_token_ms": 1e3 * statistics.median(times)}))


def _first_token_times(address: str, num_requests: int) -> list[float]:
    choose = random.Random(1)
    times = []
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(_WARM_UP + num_requests):
            ids = [choose.randrange(_FIRST_ID, _END_ID) for _ in range(_PROMPT_TOKENS)]
            request = generate_pb2.GenerateRequest(
                token_ids=generate_pb2.TokenIds(ids=ids),
                sampling=sampling_pb2.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True),
            )
            started_at = time.perf_counter()
            first_at = None
            for response in stub.Generate(request):
                if first_at is None and response.delta.token_ids:
                    first_at = time.perf_counter()
            if first_at is None:
                raise SystemExit("a stream ended without a token")
            times.append(first_at - started_at)
    return times[_WARM_UP:]


if __name__ == "__main__":
    main()
