"""The verb `completion`: scripts for shells, with lists of verbs and flags. They start no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triptych_cli.bench.config import BenchServeConfig
from triptych_cli.config import ServeConfig
from triptych_cli.flags import RESERVED
from triptych_cli.ray.config import RayPlaceConfig
from triptych_cli.services import SERVICES, config_of
from triptych_kit.config import flag_names

# The words that may follow those of a path, such as ("bench", "serve").
Words = Mapping[tuple[str, ...], Sequence[str]]

_BASH = """\
_triptych() {{
  local at='' word words=''
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$at $word" in {paths}) at="$at $word";; esac
  done
  case "$at" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _triptych triptych
"""
_ZSH = """\
#compdef triptych
_triptych() {{
  local at='' word
  for word in "${{(@)words[2,CURRENT-1]}}"; do
    case "$at $word" in {paths}) at="$at $word";; esac
  done
  case "$at" in
{cases}
  esac
  _files
}}
compdef _triptych triptych
"""
_FISH = """\
function __triptych_words
  set -l at ''
  for word in (commandline -opc)[2..-1]
    switch "$at $word"
      case {paths}
        set at "$at $word"
    end
  end
  switch "$at"
{cases}
  end
end
complete -c triptych -a '(__triptych_words)'
"""


def completion_script(shell: str, command: Any) -> str:
    """The script of a shell. command: the verbs, as typer has them."""
    words = words_of(command)
    paths = [_text(path) for path in words if path]
    if shell == "fish":
        cases = [f"    case '{_text(path)}'\n      printf '%s\\n' {' '.join(words[path])}" for path in words]
        return _FISH.format(paths=" ".join(f"'{path}'" for path in paths), cases="\n".join(cases))
    action, template = ("words='{}'", _BASH) if shell == "bash" else ("compadd -- {}", _ZSH)
    cases = [f"    '{_text(path)}') {action.format(' '.join(words[path]))};;" for path in words]
    return template.format(paths="|".join(f"'{path}'" for path in paths), cases="\n".join(cases))


def words_of(command: Any) -> Words:
    """The verbs below each verb, and the flags of those that have none below."""
    words: dict[tuple[str, ...], Sequence[str]] = {}
    _add_words(words, (), command)
    # Verbs that pass their arguments on have the flags of configurations.
    for service in SERVICES:
        words[service,] = _flags(config_of(service))
    words["serve",] = _flags(ServeConfig, *map(config_of, SERVICES))
    words["bench", "serve"] = _flags(BenchServeConfig)
    words["ray", "place"] = _flags(RayPlaceConfig, config_of("engine"))
    return words


def _add_words(words: dict[tuple[str, ...], Sequence[str]], path: tuple[str, ...], command: Any) -> None:
    verbs = getattr(command, "commands", {})
    context = command.make_context("triptych", [], resilient_parsing=True)
    options = [
        spelling
        for option in command.get_params(context)
        if option.param_type_name == "option"
        for spelling in (*option.opts, *option.secondary_opts)
    ]
    words[path] = [*verbs, *options]
    for name, verb in verbs.items():
        _add_words(words, (*path, name), verb)


def _flags(*configs: type) -> list[str]:
    flags = {flag for config in configs for flag in flag_names(config)}
    return [*sorted(flags if len(configs) == 1 else flags - RESERVED), "--config", "--help"]


def _text(path: tuple[str, ...]) -> str:
    return "".join(f" {name}" for name in path)
