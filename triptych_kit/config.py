"""One frozen dataclass per service, filled from flags, environment, a YAML file and defaults, in this order.

The dataclass is the only source of options: flag, variable and help text are derived from its fields. The
origin of each value is recorded, and an unknown name is an error that suggests the nearest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import textwrap
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from triptych_kit.values import ValueType, parse_text, parse_yaml, value_type

T = TypeVar("T")

_CONFIG_FLAG = "--config"
_CONFIG_HELP = "YAML file of options, below flags and environment"
_NUMBER = re.compile(r"-\.?\d")
_HELP_COLUMN = 32
_HELP_WIDTH = 80


class ConfigError(ValueError):
    """An invalid configuration: unknown name, wrong value, missing option."""


class UnknownKeys(ConfigError):
    """Keys of a file that are no options."""

    def __init__(self, keys: Sequence[str], known: Collection[str], path: str) -> None:
        super().__init__(unknown_names("option", keys, lambda key: nearest(key, known), f" in {path}"))
        self.keys, self.known, self.path = keys, known, path


@dataclass(frozen=True, slots=True)
class Loaded(Generic[T]):
    """A configuration and, by field, where its value came from: flag, env NAME, file PATH or default."""

    config: T
    origins: dict[str, str]

    def changed(self) -> dict[str, str]:
        """The options not at their defaults, as `value (origin)`, for the log line at startup."""
        return {
            name: f"{getattr(self.config, name)} ({origin})"
            for name, origin in self.origins.items()
            if origin != "default"
        }


@dataclass(frozen=True, slots=True)
class _Option:
    name: str
    kind: ValueType
    help: str
    short: str | None
    alias: str | None
    hint: str
    is_positional: bool
    default: Any

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def spellings(self) -> list[str]:
        others = [one for one in (self.short, self.alias) if one is not None]
        if self.kind.is_switch:
            return [self.flag, "--no-" + self.flag[2:], *others]
        return [self.flag, *others]


def option(
    default: Any = MISSING,
    *,
    help: str,  # the name that command-line libraries use
    short: str | None = None,
    alias: str | None = None,
    choices: Sequence[str] | None = None,
    hint: str = "",
    size: bool = False,
    positional: bool = False,
) -> Any:
    """A field of a configuration dataclass. Without a default the option is required.

    `short` is a second spelling with one dash, `alias` a former name that the help does not show. `hint` is
    the end of an error about a value. `size` accepts 16k, 2M or 1.5GiB, and `positional` reads the field
    from the argument that is not a flag.
    """
    metadata = {
        "help": help,
        "short": None if short is None else "-" + short.lstrip("-"),
        "alias": None if alias is None else "--" + alias.replace("_", "-"),
        "choices": None if choices is None else tuple(choices),
        "hint": hint and f"; {hint}",
        "size": size,
        "positional": positional,
    }
    return dataclasses.field(default=default, metadata=metadata)


def load_config(
    cls: type[T], argv: Sequence[str], *, service: str, env: Mapping[str, str] | None = None
) -> Loaded[T]:
    """Fill `cls` from `argv`, TRIPTYCH_<SERVICE>_* variables, the file of `--config` and defaults.

    Raises ConfigError, also for values that `__post_init__` refuses with a ValueError.
    """
    options = _options_of(cls)
    variables = os.environ if env is None else env
    from_flags = _read_flags(options, argv)
    from_env, file_in_env = _read_env(options, variables, service)
    path = from_flags.pop(_CONFIG_FLAG, file_in_env)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(options, "default")
    if path is not None:
        values = _read_file(options, path)
        origins |= dict.fromkeys(values, f"file {path}")
    for name, value in from_env.items():
        values[name], origins[name] = value, f"env {_variable(service, name)}"
    for name, value in from_flags.items():
        values[name], origins[name] = value, "flag"
    for name, one in options.items():
        if one.default is MISSING and name not in values:
            raise ConfigError(f"{_shown(one)} is required")
    try:
        return Loaded(cls(**values), origins)
    except ValueError as error:
        raise ConfigError(_in_flags(str(error), options)) from error


def typed_values(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of options of `cls` by name, as a YAML file would have them. Raises ConfigError."""
    options = _options_of(cls)
    typed = {}
    for name, option in values.items():
        value = list(option) if isinstance(option, tuple) else option
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        try:
            typed[name] = parse_yaml(value, options[name].kind)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}{options[name].hint}") from error
    return typed


def _in_flags(text: str, options: Mapping[str, _Option]) -> str:
    """An error of a configuration with flags for the names of fields.

    A name that is an ordinary word, such as `rate`, is a field only where the error begins with it; one in
    quotes is a value.
    """

    def shown(match: re.Match[str]) -> str:
        one = options.get(match[0])
        return match[0] if one is None or one.is_positional else one.flag

    return re.sub(r"^[a-z0-9]+\b|\b(?<![\"'])[a-z0-9]+(?:_[a-z0-9]+)+\b", shown, text)


def require(holds: bool, name: str, value: object, limit: str) -> None:
    """Raise ConfigError, which names the flag of the option, its value and its limit, unless `holds`."""
    if not holds:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}, it has to be {limit}")


def flag_names(cls: type[Any]) -> set[str]:
    """Every spelling of every flag of `cls`, negations included; the launcher routes flags by it."""
    return {spelling for one in _options_of(cls).values() for spelling in one.spellings()}


def switch_names(cls: type[Any]) -> set[str]:
    """The flags of `cls` that take no value."""
    switches = [one for one in _options_of(cls).values() if one.kind.is_switch]
    return {spelling for one in switches for spelling in one.spellings()}


def unknown_flags(argv: Sequence[str], known: Collection[str], switches: Collection[str]) -> list[str]:
    """The flags in `argv` that are not `known`. The word after one that takes a value is its value."""
    unknown, has_value = [], False
    for argument in argv:
        spelling, equals, _ = argument.partition("=")
        is_value, has_value = has_value and not argument.startswith("--"), False
        if is_value or not _is_flag(argument) or _NUMBER.match(argument):
            continue
        if spelling in known:
            has_value = not equals and spelling not in switches
        elif spelling not in unknown:
            unknown.append(spelling)
    return unknown


def unknown_names(what: str, names: Sequence[str], hint_of: Callable[[str], str], where: str = "") -> str:
    """An error about all unknown names, each with its hint."""
    if len(names) == 1:
        return f"unknown {what} {names[0]}{where}{hint_of(names[0])}"
    return "\n".join([f"unknown {what}s{where}:", *(f"  {name}{hint_of(name)}" for name in names)])


def nearest(name: str, known: Collection[str]) -> str:
    """The end of an error about an unknown name: the known name that is like it, if there is one."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def usage(cls: type[Any], program: str) -> str:
    """The help text: how to call the program, then each option with its meaning and default."""
    options = _options_of(cls).values()
    positional = [one for one in options if one.is_positional]
    shown = [one.name.upper() if one.default is MISSING else f"[{one.name.upper()}]" for one in positional]
    return help_text(
        " ".join([program, "[OPTIONS]", *shown]),
        {
            "Arguments": [_entry(one) for one in positional],
            "Options": [*option_help(cls).values(), (f"{_CONFIG_FLAG} <file>", _CONFIG_HELP)],
        },
    )


def option_help(cls: type[Any]) -> dict[str, tuple[str, str]]:
    """Spelling and help of the options by flag, positional ones left out."""
    return {one.flag: _entry(one) for one in _options_of(cls).values() if not one.is_positional}


def help_text(call: str, sections: Mapping[str, Sequence[tuple[str, str]]]) -> str:
    """A help text with a section for each list of entries, in the layout of the other verbs (typer's)."""
    lines = [f"Usage: {call}"]
    for title, entries in sections.items():
        if not entries:
            continue
        lines += ["", f"{title}:"]
        for spelled, text in entries:
            wrapped = textwrap.wrap(text, _HELP_WIDTH - _HELP_COLUMN, break_on_hyphens=False)
            head = f"  {spelled}"
            if len(head) <= _HELP_COLUMN - 2:
                head = head.ljust(_HELP_COLUMN) + "".join(wrapped[:1])
                wrapped = wrapped[1:]
            lines += [head.rstrip(), *(" " * _HELP_COLUMN + line for line in wrapped)]
    return "\n".join(lines)


def read_file_flags(classes: Sequence[type[Any]], path: str) -> dict[str, list[str]]:
    """The options of a YAML file as flags, by name. Each is of the first of `classes` that has it.

    Raises ConfigError.
    """
    options = {name: one for cls in reversed(classes) for name, one in _options_of(cls).items()}
    return {
        name: _as_flags(options[name], value)
        for name, value in _read_file(options, path).items()
        if value is not None
    }


def _as_flags(one: _Option, value: Any) -> list[str]:
    if one.kind.is_switch:
        return [one.flag if value else "--no-" + one.flag[2:]]
    if one.kind.is_list:
        return [f"{one.flag}={','.join(map(str, value))}"]
    return [f"{one.flag}={value}"]


def read_environment(name: str) -> str:
    """An environment variable that is not an option of ours (OTEL_*, NO_COLOR); "" if it is unset."""
    return os.environ.get(name, "")


def _options_of(cls: type[Any]) -> dict[str, _Option]:
    hints = typing.get_type_hints(cls)
    options = {}
    # Options that all services have are by keyword alone. They come after those that this one is about.
    for field in sorted(dataclasses.fields(cls), key=lambda field: field.kw_only is True):
        metadata = field.metadata
        is_size, choices = metadata.get("size", False), metadata.get("choices")
        kind = value_type(hints[field.name], is_size=is_size, choices=choices)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        options[field.name] = _Option(
            name=field.name,
            kind=kind,
            help=metadata.get("help", ""),
            short=metadata.get("short"),
            alias=metadata.get("alias"),
            hint=metadata.get("hint", ""),
            is_positional=metadata.get("positional", False),
            default=default,
        )
    return options


def _read_flags(options: dict[str, _Option], argv: Sequence[str]) -> dict[str, Any]:
    by_spelling = {spelling: one for one in options.values() for spelling in one.spellings()}
    positional = next((one for one in options.values() if one.is_positional), None)
    values: dict[str, Any] = {}
    known = {*by_spelling, _CONFIG_FLAG}
    switches = {spelling for spelling, one in by_spelling.items() if one.kind.is_switch}
    if unknown := unknown_flags(argv, known, switches):
        raise ConfigError(unknown_names("flag", unknown, lambda flag: nearest(flag, known)))
    arguments = iter(argv)
    for argument in arguments:
        if not _is_flag(argument):
            if positional is None or positional.name in values:
                raise ConfigError(f"unexpected argument {argument!r}")
            values[positional.name] = _parsed(positional, argument, positional.name.upper())
            continue
        spelling, equals, attached = argument.partition("=")
        if spelling != _CONFIG_FLAG and spelling not in by_spelling:
            raise ConfigError(f"unexpected argument {argument!r}")
        one = by_spelling.get(spelling)
        if one is not None and one.kind.is_switch and not equals:
            values[one.name] = not spelling.startswith("--no-") or spelling == one.flag
            continue
        text = attached if equals else next(arguments, None)
        if text is None or (not equals and text.startswith("--")):
            raise ConfigError(f"{spelling} needs a value")
        if one is None:
            values[_CONFIG_FLAG] = text
        elif one.kind.is_list:
            values[one.name] = values.get(one.name, ()) + _parsed(one, text, spelling)
        elif one.kind.is_switch and spelling != one.flag and spelling != one.short:
            raise ConfigError(f"{spelling} takes no value")
        else:
            values[one.name] = _parsed(one, text, spelling)
    return values


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument != "-"


def _read_env(
    options: dict[str, _Option], variables: Mapping[str, str], service: str
) -> tuple[dict[str, Any], str | None]:
    prefix = _variable(service, "")
    by_variable = {_variable(service, name): one for name, one in options.items()}
    path_variable = prefix + "CONFIG"
    own = {name: text for name, text in variables.items() if name.startswith(prefix)}
    known = [*by_variable, path_variable]
    if unknown := [name for name in own if name not in known]:
        raise ConfigError(unknown_names("environment variable", unknown, lambda name: nearest(name, known)))
    path = own.pop(path_variable, None)
    values = {by_variable[name].name: _parsed(by_variable[name], text, name) for name, text in own.items()}
    return values, path


def _read_file(options: dict[str, _Option], path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold one mapping of options")
    values: dict[str, Any] = {}
    if unknown := [str(key) for key in content if str(key).replace("-", "_") not in options]:
        raise UnknownKeys(unknown, list(options), path)
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name in values:
            raise ConfigError(f"option {key} is given twice in {path}")
        try:
            values[name] = parse_yaml(value, options[name].kind)
        except ValueError as error:
            raise ConfigError(f"{key} in {path}: {error}{options[name].hint}") from error
    return values


def _parsed(one: _Option, text: str, source: str) -> Any:
    try:
        return parse_text(text, one.kind)
    except ValueError as error:
        raise ConfigError(f"{source}: {error}{one.hint}") from error


def _variable(service: str, name: str) -> str:
    return f"TRIPTYCH_{service}_{name}".upper()


def _shown(one: _Option) -> str:
    return one.name.upper() if one.is_positional else one.flag


def _spelled(one: _Option) -> str:
    short = [] if one.short is None else [one.short]
    if one.kind.is_switch:
        return ", ".join([*short, f"--[no-]{one.flag[2:]}"])
    value = one.kind.scalar.__name__
    if one.kind.choices:
        value = "|".join(one.kind.choices)
    elif one.kind.is_size:
        value = "size"
    return ", ".join([*short, one.flag]) + f" <{value}>"


def _entry(one: _Option) -> tuple[str, str]:
    notes = []
    if one.kind.is_list:
        notes.append("repeatable")
    if one.default is MISSING:
        notes.append("required")
    elif one.default not in (None, ()):
        default = ",".join(map(str, one.default)) if one.kind.is_list else one.default
        notes.append(f"default: {default}")
    text = one.help + (f"  [{'; '.join(notes)}]" if notes else "")
    return (one.name.upper() if one.is_positional else _spelled(one)), text
