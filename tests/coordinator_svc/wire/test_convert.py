"""What engines send is checked before anything is made of it."""

from __future__ import annotations

import pytest

from coordinator_svc.wire.convert import check_frontend, to_registration
from service_kit.errors import InvalidArgument
from tests.coordinator_svc.fakes import registration
from triptych.coordinator.v1 import coordinator_pb2


def test_no_label_of_a_name_is_longer_than_resolvers_take() -> None:
    longest = "a" * 63
    for name in (longest, f"{longest}.{longest}.example"):
        to_registration(registration(endpoint=f"{name}:7000", host=name))
    for name in (longest + "a", f"node.{longest}a.example"):
        with pytest.raises(InvalidArgument, match="endpoint"):
            to_registration(registration(endpoint=f"{name}:7000"))
        with pytest.raises(InvalidArgument, match="host"):
            to_registration(registration(host=name))


@pytest.mark.parametrize("field", ["engine_id", "dp_group", "parallel_config_hash"])
@pytest.mark.parametrize("text", ["a" * 129, "two\nlines", "\x1b[2J"], ids=["long", "lines", "escape"])
def test_names_are_short_and_can_be_printed(field: str, text: str) -> None:
    """They are in lines that people read, and in what every frontend is told."""
    to_registration(registration(**{field: "a" * 128}))
    with pytest.raises(InvalidArgument, match=f"{field} has "):
        to_registration(registration(**{field: text}))


def test_a_frontend_is_known_by_a_name_that_can_be_printed() -> None:
    check_frontend(coordinator_pb2.FrontendRegistration(frontend_id="frontend 0"))
    for name in ("", "two\nlines", "a" * 129):
        with pytest.raises(InvalidArgument, match="frontend_id has "):
            check_frontend(coordinator_pb2.FrontendRegistration(frontend_id=name))
    # All frontends are in the snapshot that each of them gets.
    with pytest.raises(InvalidArgument, match="endpoint has 100000 characters"):
        check_frontend(coordinator_pb2.FrontendRegistration(frontend_id="a", endpoint="a" * 100_000))
