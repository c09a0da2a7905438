"""How a verb ends with an error: its exit code, and each sentence once on stderr, with the names of flags."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field

import grpc

from triptych_cli.client_channel import client_credentials
from triptych_cli.verbs.probe import describe_port
from triptych_kit.channel import parse_target
from triptych_kit.config import ConfigError
from triptych_kit.errors import DeadlineExceeded, InvalidArgument, ServiceError, Unavailable, Unimplemented

# What gRPC reports of an address at which no connection could be made.
_UNREACHABLE = re.compile(
    r"failed to connect|DNS resolution failed|errors resolving|not reached", re.IGNORECASE
)
# What a server answers to a call of a service that it does not have.
_NOT_SERVED = re.compile(r"^/\S+ is not served here$|^Method not found!$")
_NO_FRONTEND = (
    "is no frontend: an engine, a coordinator or an admin listener does not answer this;"
    " --url takes the address that `triptych serve` shows as gRPC"
)
_FRONTEND_HINT = "is `triptych serve` running? --url names another address"


class WrongService(ServiceError):
    """The address is of a service that does not serve the call; the message says which does."""

    code = grpc.StatusCode.UNIMPLEMENTED


@dataclass(frozen=True, slots=True)
class Target:
    """The server that a verb calls, and its part in errors.

    hint: what to do if no server answers at `address`.
    flags: by field of the API, the flag that sets it; those of `sampling` have the field's name.
    """

    address: str
    timeout_s: float | None = None
    hint: str = _FRONTEND_HINT
    flags: Mapping[str, str] = field(default_factory=dict)


def run_verb(work: Coroutine[None, None, int], target: Target) -> int:
    """Run `work`; returns its exit code, or 1 with the error on stderr."""
    try:
        return asyncio.run(work)
    except ServiceError as error:
        print_failure(error, target)
        return 1
    except ConfigError as error:
        # Of the files that the environment names.
        print(str(error), file=sys.stderr)
        return 1


def print_failure(error: ServiceError, target: Target) -> None:
    """Print an error of a server or of the connection on stderr: status, reason, and each sentence once."""
    # A status that gRPC has made itself has no reason of ours.
    is_of_connection = error.reason == error.code.name
    is_unreachable = isinstance(error, Unavailable) and is_of_connection
    if (is_unreachable or _is_of_target(error)) and (
        sentence := describe_port(target.address, client_credentials())
    ):
        print(sentence, file=sys.stderr)
        return
    if is_unreachable and _UNREACHABLE.search(error.message):
        print(f"no server answers at {_shown(target.address)}: {target.hint}", file=sys.stderr)
        return
    if isinstance(error, DeadlineExceeded) and is_of_connection and target.timeout_s is not None:
        address, limit = _shown(target.address), f"{target.timeout_s:g} s, see --timeout-s"
        print(f"no complete answer from {address} within {limit}", file=sys.stderr)
        return
    if (
        isinstance(error, Unimplemented)
        and _NOT_SERVED.match(error.message)
        and target.hint == _FRONTEND_HINT
    ):
        print(f"{_shown(target.address)} {_NO_FRONTEND}", file=sys.stderr)
        return
    if isinstance(error, WrongService):
        print(error.message, file=sys.stderr)
        return
    status = error.code.name if is_of_connection else f"{error.code.name} ({error.reason})"
    sentences = [error.message]
    if isinstance(error, InvalidArgument) and error.violations:
        sentences = [_in_flags(path, sentence, target.flags) for path, sentence in error.violations]
    print(f"{status}: " + "\n  ".join(sentences), file=sys.stderr)


def _is_of_target(error: ServiceError) -> bool:
    """Whether the address itself is refused, such as OpenAI's base URL, which has a path."""
    return isinstance(error, InvalidArgument) and [path for path, _ in error.violations] == ["target"]


def _in_flags(path: str, sentence: str, flags: Mapping[str, str]) -> str:
    """A sentence about the field `path` with the flags for its names of fields."""
    sentence = re.sub(r"\bsampling\.([a-z_]+)", lambda match: "--" + match[1].replace("_", "-"), sentence)
    flag = flags.get(path)
    if flag is None:
        return sentence
    renamed = re.sub(rf"^{re.escape(path)}(?![a-z_])", flag, sentence)
    return renamed if renamed != sentence else f"{flag}: {sentence}"


def _shown(target: str) -> str:
    try:
        return parse_target(target)
    except InvalidArgument:
        return target
