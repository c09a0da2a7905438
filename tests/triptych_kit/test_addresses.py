import os
import re
import socket
import stat
from pathlib import Path

import pytest

from triptych_kit.addresses import (
    AddressError,
    check_address,
    join_address,
    listen_at,
    port_in,
    split_address,
)
from triptych_kit.channel import open_channel
from triptych_kit.http.admin_http import AdminHTTP, read_page
from triptych_kit.http.pages import Page
from triptych_kit.server import ADMIN, Server


def test_where_to_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert listen_at(None, "::1", 5) == listen_at(None, "[::1]", 5) == "[::1]:5"
    assert listen_at("x.sock", "::1", 5) == f"unix:{tmp_path}/x.sock"
    assert port_in("127.0.0.1:5") == 5
    assert port_in("unix:/run/x:5") is None


@pytest.mark.parametrize("address", ["::1:5", "[::1]", "host", ":5", "host:x", "host:65536", "[::1:5"])
def test_an_address_is_a_host_and_a_port(address: str):
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)
    with pytest.raises(AddressError, match=f"address {re.escape(address)} is not host:port"):
        check_address(address)
    assert split_address("[fd00::1]:5") == ("fd00::1", 5)
    assert join_address(*split_address("a.example:5")) == "a.example:5"


@pytest.mark.parametrize(
    ("host", "dialled"), [("::1", ["[::1]"]), ("[::1]", ["[::1]"]), ("::", ["[::1]", "127.0.0.1"])]
)
async def test_listeners_at_ipv6(host: str, dialled: list[str]):
    listen = listen_at(None, host, 0)
    server = Server(listen=listen, registrations=[], profile=ADMIN, service="x")
    pages = AdminHTTP(listen, {"/x": page})
    try:
        bound, bound_pages = [await server.start(), await pages.start()]
        assert bound.startswith(f"[{host.strip('[]')}]:")
        for own in dialled:
            async with open_channel(f"grpc://{own}:{port_in(bound)}") as channel:
                await channel.channel_ready()
            assert await read_page(f"{own}:{port_in(bound_pages)}", "/x", limit_s=10) == b"content"
    finally:
        await server.stop(0)
        await pages.stop(0)


async def page(target: str) -> Page:
    return Page(b"content")


async def test_a_socket_is_for_its_user_and_goes_with_its_listener(tmp_path: Path):
    server = Server(listen=f"unix:{tmp_path}/g.sock", registrations=[], profile=ADMIN, service="x")
    pages = AdminHTTP(f"unix:{tmp_path}/h.sock", {"/x": page})
    addresses = [await server.start(), await pages.start()]
    assert addresses == [f"unix:{tmp_path}/g.sock", f"unix:{tmp_path}/h.sock"]
    for address in addresses:
        assert stat.S_IMODE(os.stat(address.removeprefix("unix:")).st_mode) == 0o600
        with pytest.raises(AddressError, match="is already in use"):
            check_address(address)
    async with open_channel(addresses[0]) as channel:
        await channel.channel_ready()
    assert await read_page(addresses[1], "/x", limit_s=10) == b"content"
    await server.stop(0)
    await pages.stop(0)
    assert list(tmp_path.iterdir()) == []


def test_the_socket_of_a_process_that_is_gone_is_taken_over(tmp_path: Path):
    path = tmp_path / "x.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    check_address(f"unix:{path}")
    assert not path.exists()


@pytest.mark.parametrize(
    ("path", "error"),
    [("/" + "x" * 107, "is not an absolute path of up to 107 bytes"), ("/no/such/x", "is in no folder")],
)
def test_what_is_no_path_of_a_socket(path: str, error: str):
    with pytest.raises(AddressError, match=error):
        check_address(f"unix:{path}")


def test_a_file_is_not_removed(tmp_path: Path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(AddressError, match="is a file, and no socket"):
        check_address(f"unix:{tmp_path}/x")
    assert (tmp_path / "x").read_text() == "mine"
