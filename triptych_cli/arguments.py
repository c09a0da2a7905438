"""Parses the arguments of `serve` and `engine`: routing to the services, and the model. Imports no gRPC."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_svc.config import EngineConfig
from triptych_cli.config import ServeConfig
from triptych_cli.flags import RESERVED, split_flags
from triptych_cli.services import SERVICES, config_of, embedded_model
from triptych_cli.vllm_names import describe_unknown_keys
from triptych_kit.config import (
    ConfigError,
    Loaded,
    UnknownKeys,
    flag_names,
    help_text,
    load_config,
    option_help,
    read_environment,
    read_file_flags,
    switch_names,
)
from triptych_kit.listeners import Listener, check_listeners
from triptych_kit.security.options import SecurityOptions

EMBEDDED_NAME = "triptych-tiny"
_NAME_FLAG = "--served-model-name"

_EMBEDDED_DEFAULTS = {
    _NAME_FLAG: EMBEDDED_NAME,
    # A second thread does not help such a small model, and costs most of its speed when cores are shared.
    "--num-threads": "1",
}

# Required flags whose value is only known when the service is started; any value, for the check here.
_FLAGS_OF_FRONTEND_SET_LATER = ("--coordinator=127.0.0.1:1",)


_HELP_ORDER = ("engine", "frontend", "coordinator")
# In this order.
_COMMON = (
    "--host", "--port", "--grpc-port", "--http-port", "--dtype", "--device", "--quantization",
    "--max-model-len", "--gpu-memory-utilization", "--kv-cache-memory", "--max-num-seqs",
    "--data-parallel-size", "--tensor-parallel-size", "--served-model-name", "--chat-template",
    "--tool-parser", "--reasoning-parser", "--verbose", "--log-level",
)  # fmt: skip
_OF_SEVERAL = "Options of several services, which all get them"
_SECTIONS = {
    "": "Common options",
    "serve": "Options of the stack",
    "engine": "Options of the engines",
    "frontend": "Options of the frontend",
    "coordinator": "Options of the coordinator",
    "several": _OF_SEVERAL,
}
_MODEL_HELP = "model folder, GGUF file, or org/name of the hub; without it the embedded model"


@dataclass(frozen=True, slots=True)
class Serving:
    """Parsed arguments of `serve`: its own options and the flags of each service."""

    config: ServeConfig
    flags: Mapping[str, Sequence[str]]  # by service
    group: str = ""  # the data-parallel group of its engines
    sizes_cache: bool = False  # whether the user has set the size of the KV cache
    engine: EngineConfig | None = None  # of the first engine; None: one that is known to start
    tokenizer: str | None = None  # of the frontends, in place of the model's
    has_tls: bool = False  # whether clients use TLS
    has_keys: bool = False  # whether clients need a key
    security: Sequence[SecurityOptions] = ()  # of the services
    listeners: Sequence[Listener] = ()

    @property
    def has_credentials(self) -> bool:
        """Whether clients need a key or a certificate."""
        return self.has_keys or any(one.ssl_ca_certs is not None for one in self.security)

    @property
    def tls(self) -> SecurityOptions | None:
        """The options of the listeners for clients, if these use TLS."""
        with_tls = [one for one in self.security if one.ssl_certfile is not None]
        return with_tls[-1] if self.has_tls else None

    @property
    def model(self) -> str:
        """The model's name in messages."""
        return self.config.model or read_environment("TRIPTYCH_ENGINE_MODEL") or "the embedded model"


def parse_serve(argv: Sequence[str]) -> Serving:
    """Read the arguments of `serve`; raises ConfigError."""
    argv = _with_file(_with_each_name(argv))
    own, flags = split_flags(argv, ServeConfig, {service: config_of(service) for service in SERVICES})
    config = load_config(ServeConfig, own, service="serve").config
    if config.ready_file:
        _check_writable(Path(config.ready_file))
    flags["engine"] += [f"{_NAME_FLAG}={name}" for name in config.served_model_name[:1]]
    flags["frontend"] += [f"--model-alias={name}" for name in config.served_model_name[1:]]
    flags["engine"] = with_model([*([config.model] if config.model else []), *flags["engine"]])
    fixed_flags = (f"--data-parallel-size={config.data_parallel_size}",)
    engine = load_config(EngineConfig, [*flags["engine"], *fixed_flags], service="engine")
    coordinator: Loaded[Any] = load_config(
        config_of("coordinator"), flags["coordinator"], service="coordinator"
    )
    frontend: Loaded[Any] = load_config(
        config_of("frontend"),
        [*flags["frontend"], f"--host={config.host}", *_FLAGS_OF_FRONTEND_SET_LATER],
        service="frontend",
    )
    if config.data_parallel_size > 1 and engine.origins["num_threads"] == "default":
        flags["engine"].append(f"--num-threads={_threads_of_each(config.data_parallel_size)}")
    identifies_clients = frontend.config.has_keys or frontend.config.ssl_ca_certs is not None
    if identifies_clients and engine.origins["scheduling_policy"] == "default":
        # With credentials there may be several tenants; one alone is served as by the default.
        flags["engine"].append("--scheduling-policy=fair")
    sizes_cache = any(engine.origins[name] != "default" for name in ("num_kv_blocks", "kv_cache_memory"))
    hosts = {
        "coordinator": coordinator.config.admin_http_host,
        "engine": engine.config.admin_http_host,
        "frontend": frontend.config.admin_http_host,
    }
    listeners = config.listeners(admin_http_hosts=hosts)
    check_listeners(listeners)
    return Serving(
        config,
        flags,
        engine.config.data_parallel_group,
        sizes_cache,
        engine.config,
        frontend.config.tokenizer,
        frontend.config.ssl_certfile is not None,
        frontend.config.has_keys,
        (coordinator.config, engine.config, frontend.config),
        listeners,
    )


def _with_each_name(argv: Sequence[str]) -> list[str]:
    """The arguments with a flag for each name of `--served-model-name a b`, as vLLM has it.

    Without a model elsewhere, the last of several names is one if it is a folder, a GGUF file or org/name.
    """
    words = list(argv)
    for index in reversed([index for index, word in enumerate(words) if word == _NAME_FLAG]):
        is_next_flag = (other for other in range(index + 1, len(words)) if words[other].startswith("-"))
        end = next(is_next_flag, len(words))
        names, others = words[index + 1 : end], [*words[:index], *words[end:]]
        model = []
        if len(names) > 1 and not _has_model(others) and _is_model(names[-1]):
            model = [names.pop()]
        if names:
            words[index:end] = [*model, *(f"{_NAME_FLAG}={name}" for name in names)]
    return words


def _with_file(argv: Sequence[str]) -> list[str]:
    """The arguments with the options of the file of `--config` before them, so that a flag overrides them.

    The file may have options of `serve` and of all services. A variable of the environment overrides it, too.
    """
    rest, path = [], None
    arguments = iter(argv)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if flag != "--config":
            rest.append(argument)
        elif not equals and (value := next(arguments, "")) == "":
            raise ConfigError("--config needs a value")
        else:
            path = value
    if path is None:
        return rest
    configs = {"serve": ServeConfig, **{service: config_of(service) for service in SERVICES}}
    own_flags = {argument.partition("=")[0] for argument in rest}
    flags = []
    try:
        options = read_file_flags(list(configs.values()), path)
    except UnknownKeys as error:
        raise ConfigError(describe_unknown_keys(error)) from error
    for name, words in options.items():
        in_environment = any(
            read_environment(f"TRIPTYCH_{service}_{name}".upper())
            for service, config in configs.items()
            if words[0].partition("=")[0] in flag_names(config)
        )
        has_model = name == "model" and _has_model(rest)
        if not (in_environment or has_model or words[0].partition("=")[0] in own_flags):
            flags += words
    return [*flags, *rest]


def with_model(argv: Sequence[str]) -> list[str]:
    """The arguments of an engine; adds the embedded model if neither they nor the environment name one."""
    own_flags = {argument.partition("=")[0] for argument in argv}
    is_named = _has_model(argv) or read_environment("TRIPTYCH_ENGINE_MODEL")
    # A configuration file may name the model.
    if (
        is_named
        or "--config" in own_flags
        or read_environment("TRIPTYCH_ENGINE_CONFIG")
        or asks_for_help(argv)
    ):
        return list(argv)
    extra = [
        f"{flag}={value}"
        for flag, value in _EMBEDDED_DEFAULTS.items()
        if flag not in own_flags
        and not read_environment("TRIPTYCH_ENGINE_" + flag[2:].replace("-", "_").upper())
    ]
    return [str(embedded_model()), *extra, *argv]


def embedded_engine() -> list[str]:
    """The arguments of an engine with the embedded model, regardless of the environment."""
    return [str(embedded_model()), *(f"{flag}={value}" for flag, value in _EMBEDDED_DEFAULTS.items())]


def asks_for_help(argv: Sequence[str]) -> bool:
    return "--help" in argv or "-h" in argv


def serve_usage() -> str:
    """The help of `serve`: common options, then its own and those of its services, each once."""
    owners: dict[str, list[str]] = {}
    entries: dict[str, tuple[str, str]] = {}
    for owner, config in (
        ("serve", ServeConfig),
        *((service, config_of(service)) for service in _HELP_ORDER),
    ):
        for flag, entry in option_help(config).items():
            # What `serve` has itself goes to no other.
            if flag not in RESERVED and owners.get(flag) != ["serve"]:
                owners.setdefault(flag, []).append(owner)
                entries.setdefault(flag, entry)
    sections: dict[str, list[tuple[str, str]]] = {title: [] for title in _SECTIONS.values()}
    for flag in (*_COMMON, *(flag for flag in entries if flag not in _COMMON)):
        entry = entries[flag]
        title = "Common options" if flag in _COMMON else _SECTIONS.get(" ".join(owners[flag]), _OF_SEVERAL)
        note = f"  ({', '.join(owners[flag])})" if title == _OF_SEVERAL else ""
        sections[title].append((entry[0], entry[1] + note))
    of_file = ("--config <file>", "YAML file of options of all services, below flags and environment")
    sections["Common options"].append(of_file)
    call = "triptych serve [OPTIONS] [MODEL]"
    return help_text(call, {"Arguments": [("MODEL", _MODEL_HELP)], **sections})


def _threads_of_each(num_engines: int) -> int:
    """Engines on one machine divide its cores: if each used all, they would be slower than one engine."""
    return max(1, len(os.sched_getaffinity(0)) // num_engines)


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"ready file {path} is a folder")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"ready file {path}: its folder does not exist or is not writable")


def _is_model(name: str) -> bool:
    return "/" in name or name.endswith(".gguf") or Path(name).is_dir()


def _has_model(argv: Sequence[str]) -> bool:
    switches = switch_names(ServeConfig).union(*(switch_names(config_of(service)) for service in SERVICES))
    takes_value = False
    for argument in argv:
        if not takes_value and not argument.startswith("-"):
            return True
        takes_value = argument.startswith("-") and "=" not in argument and argument not in switches
    return False
