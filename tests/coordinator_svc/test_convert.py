"""What engines send is checked before anything is made of it."""

from __future__ import annotations

import pytest

from coordinator_svc.convert import to_registration
from service_kit.errors import InvalidArgument
from tests.coordinator_svc.fakes import registration


def test_no_label_of_a_name_is_longer_than_resolvers_take() -> None:
    longest = "a" * 63
    for name in (longest, f"{longest}.{longest}.example"):
        to_registration(registration(endpoint=f"{name}:7000", host=name))
    for name in (longest + "a", f"node.{longest}a.example"):
        with pytest.raises(InvalidArgument, match="endpoint"):
            to_registration(registration(endpoint=f"{name}:7000"))
        with pytest.raises(InvalidArgument, match="host"):
            to_registration(registration(host=name))
