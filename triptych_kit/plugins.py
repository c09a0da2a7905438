"""Extensions by entry points: code to run at startup, and implementations to choose by name.

An entry point in the group `triptych.plugins` is a callable without arguments, such as one that registers a
model. It is called once in every process that may need it, before the process builds anything. Knows no
service.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from typing import TypeVar

from triptych_kit.config import ConfigError

_Offered = TypeVar("_Offered")

GROUP = "triptych.plugins"
# A reserved name: every installed plugin.
ALL = "all"


class PluginError(Exception):
    """A requested plugin is not installed, or fails. The message names it."""


def load_plugins(wanted: Sequence[str], *, group: str = GROUP) -> list[str]:
    """Call each wanted plugin once, in the order of their names; returns these names.

    `wanted` has names of plugins, or `all`; empty means none. Raises PluginError.
    """
    # The same package may be on the path twice; each of its plugins is called once.
    installed = {(point.name, point.value): point for point in metadata.entry_points(group=group)}
    names = {name for name, _ in installed}
    unknown = sorted(set(wanted) - names - {ALL})
    if unknown:
        known = f"installed are {', '.join(sorted(names))}" if names else "none is installed"
        raise PluginError(f"plugin {unknown[0]} is not installed; {known}")
    chosen = [installed[key] for key in sorted(installed) if ALL in wanted or key[0] in wanted]
    for point in chosen:
        _call(point)
    return [point.name for point in chosen]


def find_offered(name: str, own: Mapping[str, _Offered], *, group: str, option: str) -> _Offered:
    """The implementation that `option` names: one of `own`, or an entry point in `group`.

    Raises ConfigError, with the known names. An entry point cannot replace one of `own`.
    """
    check_offered(name, own, group=group, option=option)
    if name in own:
        return own[name]
    implementation: _Offered = metadata.entry_points(group=group)[name].load()
    return implementation


def check_offered(name: str, own: Collection[str], *, group: str, option: str) -> None:
    """Raise ConfigError, with the known names, where `find_offered` would; loads nothing."""
    offered = () if name in own else metadata.entry_points(group=group).names
    if name not in own and name not in offered:
        known = sorted({*own, *offered})
        raise ConfigError(f"{option} is {name!r}, it has to be one of {', '.join(known)}")


def _call(point: metadata.EntryPoint) -> None:
    try:
        point.load()()
    except Exception as error:  # Third-party code may raise anything; the message must name the plugin.
        what = " ".join(str(error).split())
        raise PluginError(f"plugin {point.name} ({point.value}): {type(error).__name__}: {what}") from error
