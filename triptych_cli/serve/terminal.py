"""Output of `serve` on a terminal: the progress of loading, and the addresses that are served."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence

import grpc

from engine_svc.build.start_check import shown_size
from engine_svc.core.facts import LoadProgress
from engine_svc.process.load_display import LoadDisplay
from triptych.engine.v1 import engine_pb2, engine_pb2_grpc, session_pb2
from triptych_kit.addresses import (
    is_loopback,
    is_wildcard,
    join_address,
    loopback_of,
    split_address,
    unix_path,
)
from triptych_kit.channel import open_channel
from triptych_kit.clock import MonotonicClock
from triptych_kit.version import installed_version

_INTERVAL_S = 0.2
_CALL_LIMIT_S = 2.0


async def show_progress(addresses: Sequence[Callable[[], str]]) -> None:
    """Draw a bar of how far the engines have loaded, one after another; to be cancelled when all are ready.

    addresses: where the engines are, or "" as long as that is not known.
    """
    display = LoadDisplay(sys.stderr, MonotonicClock())
    try:
        for address in addresses:
            while not address():  # noqa: ASYNC110  The supervisor has no event for it.
                await asyncio.sleep(_INTERVAL_S)
            await _show_progress_of(address(), display)
    finally:
        display.close()


async def _show_progress_of(address: str, display: LoadDisplay) -> None:
    async with open_channel(address) as channel:
        while True:
            with contextlib.suppress(grpc.RpcError):
                info = await _info(channel)
                if info.HasField("ready"):
                    return
                progress = info.load_progress
                if progress.total:
                    display.show(LoadProgress(progress.phase, progress.done, progress.total))
            await asyncio.sleep(_INTERVAL_S)


async def describe_engine(address: str) -> session_pb2.Ready:
    """The facts of a ready engine; empty if it does not answer."""
    async with open_channel(address) as channel:
        try:
            return (await _info(channel)).ready
        except grpc.RpcError:
            return session_pb2.Ready()


async def _info(channel: grpc.aio.Channel) -> engine_pb2.GetEngineInfoResponse:
    stub = engine_pb2_grpc.EngineCoreServiceStub(channel)
    info: engine_pb2.GetEngineInfoResponse = await stub.GetEngineInfo(
        engine_pb2.GetEngineInfoRequest(), timeout=_CALL_LIMIT_S
    )
    return info


def banner(
    model: str,
    addresses: Sequence[str],
    ready: session_pb2.Ready,
    admin_addresses: Mapping[str, str],
    admin_https: Mapping[str, str],
    kv_cache_memory: int | None,
    http: str = "",
    *,
    tls_hosts: Sequence[str] | None = None,
    verifies_clients: bool = False,
    has_keys: bool = False,
) -> str:
    """The text printed once everything is ready.

    kv_cache_memory: the value of its flag, in bytes.  http: the address of OpenAI's API, empty without one.
    tls_hosts: hosts that the certificate is for; None without TLS.  verifies_clients: whether callers need a
    certificate.  has_keys: whether they need a key.
    """
    has_tls = tls_hosts is not None
    # Those at a socket can be scraped by nothing; alone, the frontend's are where its page is.
    num_scraped = sum(unix_path(one) is None for one in admin_https.values())
    metrics = [
        f"{name} http{'s' if has_tls else ''}://{one}/metrics"
        for name, one in admin_https.items()
        if unix_path(one) is None and not (name.startswith("frontend") and num_scraped == 1)
    ]
    secure = "s" if has_tls else ""
    frontends = [one for name, one in admin_https.items() if name.startswith("frontend")]
    # The HTTP port, which stays the same, has the page, too, where it is on loopback.
    pages = [
        one
        for one in (http, *frontends)
        if one and unix_path(one) is None and is_loopback(split_address(one)[0])
    ]
    url = f"grpc{secure}://{_reachable(addresses[0], tls_hosts)}"
    verb = f"--url {url}" + (" --cacert CA.pem" if has_tls else "")
    notes = [
        *(
            ["CA.pem (or TRIPTYCH_CA_CERTS) is the CA of the certificate, if the system does not know it"]
            if has_tls
            else []
        ),
        *(
            ["TRIPTYCH_CERTFILE and TRIPTYCH_KEYFILE are the caller's certificate"]
            if verifies_clients
            else []
        ),
        *(["TRIPTYCH_API_KEY is the caller's key"] if has_keys else []),
    ]
    cache_option = "" if kv_cache_memory is None else f"; --kv-cache-memory is {shown_size(kv_cache_memory)}"
    return "\n".join(
        (
            f"triptych {installed_version()} serves {model}",
            f"  model   {ready.model_name}, dtype {ready.fingerprint.dtype},"
            f" up to {ready.max_model_len:,} tokens a request",
            f"  KV      {ready.num_kv_blocks * ready.block_size:,} tokens an engine,"
            f" in {ready.num_kv_blocks:,} blocks{cache_option}",
            *(f"  gRPC    grpc{secure}://{one}" for one in addresses),
            *([f"  HTTP    http{secure}://{http}/v1 (OpenAI)"] if http else []),
            "  admin   " + ", ".join(f"triptych admin {name}" for name in admin_addresses),
            *([f"  metrics {', '.join(metrics)}"] if metrics else []),
            *(f"  page    http{secure}://{one}/ui" for one in pages[:1]),
            *([f"  with    {'; '.join(notes)}"] if notes else []),
            *(
                [f"  try     {_curl(http, tls_hosts, verifies_clients=verifies_clients, has_keys=has_keys)}"]
                if http
                else []
            ),
            f"  {'or' if http else 'try':<7} triptych chat {verb}",
            f"  or      triptych complete {verb} 'Once upon a time'",
        )
    )


def _curl(address: str, tls_hosts: Sequence[str] | None, *, verifies_clients: bool, has_keys: bool) -> str:
    """A command that continues a text over HTTP."""
    scheme = "http" if tls_hosts is None else "https"
    words = [
        f"curl {scheme}://{_reachable(address, tls_hosts)}/v1/completions",
        "-H 'content-type: application/json'",
        *(['-H "authorization: Bearer $TRIPTYCH_API_KEY"'] if has_keys else []),
        *([] if tls_hosts is None else ["--cacert CA.pem"]),
        *(['--cert "$TRIPTYCH_CERTFILE" --key "$TRIPTYCH_KEYFILE"'] if verifies_clients else []),
        """-d '{"prompt": "Once upon a time", "max_tokens": 40}'""",
    ]
    return " ".join(words)


def _reachable(address: str, tls_hosts: Sequence[str] | None) -> str:
    """The address for a caller on this machine, with a host that the certificate is for, if there is one."""
    host, port = split_address(address)
    is_every = is_wildcard(host)
    loopback = loopback_of(host)
    if tls_hosts is None:
        return join_address(loopback, port) if is_every else address
    own = ["localhost", loopback] if is_every or is_loopback(host) else []
    named = [one for one in tls_hosts if not one.startswith("*")]
    known = [one for one in ([] if is_every else [host]) + own if one in named]
    return join_address([*known, *named, "localhost" if is_every else host][0], port)
