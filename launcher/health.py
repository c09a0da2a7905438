"""The verb `health`: the answer of a service's health as a word and an exit code."""

from __future__ import annotations

import asyncio

from launcher.complete import print_failure
from launcher.readiness import health_of
from launcher.services import READINESS
from service_kit.errors import ServiceError

_DEFAULT_PORTS = {"frontend": 50051, "engine": 50061, "coordinator": 50071}


def run_health(url: str | None, service: str, timeout_s: float) -> int:
    """Ask `service`, by its kind or by a full gRPC name, and return 0 if it is SERVING, else 1."""
    target = url or f"grpc://127.0.0.1:{_DEFAULT_PORTS.get(service, _DEFAULT_PORTS['frontend'])}"
    try:
        answer = asyncio.run(health_of(target, READINESS.get(service, service), timeout_s))
    except ServiceError as error:
        print_failure(error)
        return 1
    print(answer)
    return 0 if answer == "SERVING" else 1
