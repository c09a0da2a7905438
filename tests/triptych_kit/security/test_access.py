"""Rules of access are about services and methods that exist, and every service has one."""

from __future__ import annotations

from google.protobuf import descriptor_pool

from tests.system.test_every_rpc import METHODS
from triptych_kit.security.access import RULES, roles_for


def test_every_rule_names_a_service_or_a_method():
    pool = descriptor_pool.Default()
    for name in RULES:
        service, _, method = name.partition("/")
        if not service.startswith("grpc."):
            found = pool.FindServiceByName(service)
            assert not method or method in found.methods_by_name


def test_every_method_has_a_rule():
    names = [f"{method.containing_service.full_name}/{method.name}" for method in METHODS]
    assert [name for name in names if not roles_for(name)] == []
