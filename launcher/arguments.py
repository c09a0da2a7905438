"""The arguments of `serve` and `engine`: whose is which, and which model. Imports no gRPC."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from launcher.config import ServeConfig
from launcher.flags import RESERVED, split_flags
from launcher.services import SERVICES, config_of, embedded_model
from service_kit.config import ConfigError, flag_names, load_config, read_environment, switch_names, usage

EMBEDDED_NAME = "triptych-tiny"


@dataclass(frozen=True, slots=True)
class Serving:
    """What to serve: the verb's own options and the arguments of each service."""

    config: ServeConfig
    flags: Mapping[str, Sequence[str]]  # by service

    @property
    def model(self) -> str:
        """The model as people know it."""
        return self.config.model or read_environment("TRIPTYCH_ENGINE_MODEL") or "the embedded model"


def parse_serve(argv: Sequence[str]) -> Serving:
    """Read the arguments of `serve`; raises ConfigError."""
    own, flags = split_flags(argv, ServeConfig, {service: config_of(service) for service in SERVICES})
    config = load_config(ServeConfig, own, service="serve").config
    if config.model and not Path(config.model).is_dir():
        # The engine would say so too, seconds later.
        raise ConfigError(f"model {config.model} is not a folder")
    flags["engine"] = with_model([*([config.model] if config.model else []), *flags["engine"]])
    return Serving(config, flags)


def with_model(argv: Sequence[str]) -> list[str]:
    """The arguments of an engine; with the embedded model if neither they nor the environment name one."""
    is_named = _has_model(argv) or read_environment("TRIPTYCH_ENGINE_MODEL")
    # A file may name the model, and then it should.
    if is_named or "--config" in argv or read_environment("TRIPTYCH_ENGINE_CONFIG") or "--help" in argv:
        return list(argv)
    given = {argument.partition("=")[0] for argument in argv}
    extra = [f"--served-model-name={EMBEDDED_NAME}"] if "--served-model-name" not in given else []
    # So small a model gains nothing from a second thread, and loses most of its speed where cores are shared.
    if "--num-threads" not in given and not read_environment("TRIPTYCH_ENGINE_NUM_THREADS"):
        extra.append("--num-threads=1")
    return [str(embedded_model()), *extra, *argv]


def serve_usage() -> str:
    """The help of `serve`: its own options, then those it hands on."""
    lines = _without(usage(ServeConfig, "triptych serve"), RESERVED)
    for service in SERVICES:
        flags = _without(usage(config_of(service), ""), flag_names(ServeConfig) | RESERVED)
        is_flag = [line.startswith("  ") and not line.startswith("  MODEL") for line in flags]
        lines += ["", f"for the {service}:", *itertools.compress(flags, is_flag)]
    return "\n".join(lines)


def _without(text: str, left_out: Set[str]) -> list[str]:
    """The lines of a help text but the entries of the flags in `left_out`; an entry may take two lines."""
    lines: list[str] = []
    shows = True
    for line in text.splitlines():
        words = line.replace("[no-]", "").replace(",", " ").split()
        if not line.startswith("    ") or (words and words[0].startswith("-")):
            shows = not left_out & set(words)
        if shows:
            lines.append(line)
    return lines


def _has_model(argv: Sequence[str]) -> bool:
    switches = switch_names(config_of("engine"))
    takes_value = False
    for argument in argv:
        if not takes_value and not argument.startswith("-"):
            return True
        takes_value = argument.startswith("-") and "=" not in argument and argument not in switches
    return False
