"""A stand-in for a service as a process: announces itself, sends "ready" to its clients, ends on SIGTERM.

A program of its own, which imports nothing of the project. What it does is written into `--diary FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path


async def serve(options: argparse.Namespace) -> int:
    ended = asyncio.Event()
    # One that dies before it is ready does not listen: an event loop greets while it closes, too.
    server = await asyncio.start_server(
        lambda _, writer: greet(writer),
        "127.0.0.1",
        options.port,
        start_serving=options.die_before_ready is None,
    )
    address = "127.0.0.1:" + str(server.sockets[0].getsockname()[1])
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    record = {"service": options.name, "index": options.index, "pid": os.getpid(), "address": address}
    record["admin_address"] = address
    record["admin_http"] = f"127.0.0.1:{options.admin_http_port}"
    if options.worker_addresses:
        record["admin_addresses"] = options.worker_addresses
    # First, as those that are started when this one has announced itself write there, too.
    if options.log is not None:
        print(options.log, file=sys.stderr)
    write(options, f"start {address} coordinator={options.coordinator}")
    with os.fdopen(options.announce_fd, "w") as pipe:
        pipe.write(json.dumps(record) + "\n")
    if options.die_before_ready is not None:
        return die(options.die_before_ready)
    await ended.wait()
    write(options, "stop")
    return 0


def greet(writer: asyncio.StreamWriter) -> None:
    writer.write(b"ready\n")
    writer.close()


def die(code: int) -> int:
    print("something went wrong\nwith this model", file=sys.stderr)
    return code


def write(options: argparse.Namespace, text: str) -> None:
    with Path(options.diary).open("a") as diary:
        diary.write(f"{options.name}-{options.index} {text}\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--diary", required=True)
    parser.add_argument("--index", type=int)
    parser.add_argument("--port", type=int)
    # It serves no HTTP: it announces what it was given, or a port of its own.
    parser.add_argument("--admin-http-port", type=int, default=os.getpid())
    parser.add_argument("--announce-fd", type=int)
    parser.add_argument("--coordinator")
    parser.add_argument("--worker-addresses", nargs="+", help="announced as those of its workers")
    parser.add_argument("--log", help="a line of its log")
    parser.add_argument("--die-at-start", type=int)
    parser.add_argument("--die-before-ready", type=int)
    parser.add_argument("--die-once", help="a file: removed, with this process, if it is there")
    options = parser.parse_args()
    if options.die_once is not None and Path(options.die_once).exists():
        Path(options.die_once).unlink()
        return die(1)
    if options.die_at_start is not None:
        return die(options.die_at_start)
    return asyncio.run(serve(options))


if __name__ == "__main__":
    raise SystemExit(main())
