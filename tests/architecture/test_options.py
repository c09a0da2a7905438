"""Every option of every service says what it is, and all services name the same things alike."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest

from triptych_kit.config import usage

SERVICES = ("frontend", "engine", "coordinator")

# A supervisor starts all of them alike, so these must be everywhere.
SHARED = {
    "host",
    "port",
    "admin_port",
    "announce_fd",
    "index",
    "log_format",
    "log_level",
    "reflection",
    "drain_deadline_s",
    "plugins",
}


def config_class(service: str) -> Any:
    module = importlib.import_module(f"{service}_svc.config")
    return getattr(module, f"{service.capitalize()}Config")


@pytest.mark.parametrize("service", SERVICES)
def test_every_option_has_a_help_text(service: str) -> None:
    fields = dataclasses.fields(config_class(service))
    assert [field.name for field in fields if len(field.metadata.get("help", "").split()) < 2] == []


@pytest.mark.parametrize("service", SERVICES)
def test_usage_names_every_option(service: str) -> None:
    text = usage(config_class(service), f"triptych {service}")
    for field in dataclasses.fields(config_class(service)):
        assert field.name.replace("_", "-") in text or field.name.upper() in text


@pytest.mark.parametrize("service", SERVICES)
def test_the_shared_options_are_there_with_the_same_types(service: str) -> None:
    names = {field.name for field in dataclasses.fields(config_class(service))}
    assert names >= SHARED


@pytest.mark.parametrize("service", SERVICES)
def test_a_configuration_is_frozen(service: str) -> None:
    assert config_class(service).__dataclass_params__.frozen
