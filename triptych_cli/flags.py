"""Routes the flags of `triptych serve` to the services whose configuration has them. Knows no values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from triptych_cli.vllm_names import describe_unknown_flags
from triptych_kit.config import ConfigError, flag_names, switch_names, unknown_flags

# Flags that the launcher sets itself; a user's value would contradict it.
RESERVED = frozenset(
    {
        "--announce-fd",
        "--index",
        "--admin-port",
        "--coordinator",
        "--engine",
        "--advertise-address",
        "--data-parallel-rank",
        "--share-port",
        "--uds",
        "--admin-uds",
        "--admin-http-uds",
        "--metrics-sockets",
    }
)


def split_flags(
    argv: Sequence[str], own: type, services: Mapping[str, type], *, reserved: Set[str] = RESERVED
) -> tuple[list[str], dict[str, list[str]]]:
    """Split arguments into those of `own` and those of each service; ConfigError for unknown flags.

    A flag of `own` goes only there; any other goes to every service that has it. Positional arguments are
    `own`'s. Flags in `reserved` are refused.
    """
    owners = {service: flag_names(config) for service, config in services.items()}
    switches = switch_names(own).union(*(switch_names(config) for config in services.values()))
    known = flag_names(own).union(*owners.values())
    if unknown := unknown_flags(argv, known | reserved, switches):
        raise ConfigError(describe_unknown_flags(unknown, known - reserved))
    kept: list[str] = []
    routed: dict[str, list[str]] = {service: [] for service in services}
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith("-"):
            kept.append(argument)
            continue
        spelling = argument.partition("=")[0]
        if spelling in reserved:
            raise ConfigError(
                f"{spelling} is for a service that runs alone; serve connects its services itself"
            )
        if spelling not in known:
            raise ConfigError(f"unexpected argument {argument!r}")
        words = [argument]
        if "=" not in argument and spelling not in switches:
            words += _value(spelling, next(arguments, None))
        if spelling in flag_names(own):
            kept += words
            continue
        for service, spellings in owners.items():
            if spelling in spellings:
                routed[service] += words
    return kept, routed


def _value(spelling: str, text: str | None) -> list[str]:
    if text is None:
        raise ConfigError(f"{spelling} needs a value")
    return [text]
