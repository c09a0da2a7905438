"""The verb `health`: the answer of a service's health as a word and an exit code."""

from __future__ import annotations

import asyncio

from launcher.complete import print_failure
from launcher.readiness import health_of
from launcher.services import READINESS
from service_kit.config import read_environment
from service_kit.errors import ServiceError

_DEFAULT_PORTS = {"frontend": 50051, "engine": 50061, "coordinator": 50071}


def run_health(url: str | None, service: str, timeout_s: float) -> int:
    """Ask `service`, by its kind or by a full gRPC name, and return 0 if it is SERVING, else 1.

    Without a URL it is the one on this host at the port that the environment gives it, as in its container.
    """
    kind = service if service in _DEFAULT_PORTS else "frontend"
    port = read_environment(f"TRIPTYCH_{kind.upper()}_PORT") or _DEFAULT_PORTS[kind]
    target = url or f"grpc://127.0.0.1:{port}"
    try:
        answer = asyncio.run(health_of(target, READINESS.get(service, service), timeout_s))
    except ServiceError as error:
        print_failure(error)
        return 1
    print(answer)
    return 0 if answer == "SERVING" else 1
