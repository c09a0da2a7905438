"""What other packages bring along, as entry points: code to run first, and things to choose by name.

A package offers code that a service's process runs before it builds anything in the group
`triptych.plugins`: a callable without arguments, such as one that registers a model of its own. It is called
once in every process that may need what it does. Knows no service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TypeVar

from service_kit.config import ConfigError

_Offered = TypeVar("_Offered")

GROUP = "triptych.plugins"
# The one name that is not a plugin's own: every one that is installed.
ALL = "all"


class PluginError(Exception):
    """A plugin that is asked for is not installed, or does not do what it promises. The message names it."""


def load_plugins(wanted: Sequence[str], *, group: str = GROUP) -> list[str]:
    """Call each wanted plugin once, in the order of their names; returns these names.

    `wanted` has names of plugins, or `all`; nothing in it means none. Raises PluginError.
    """
    # The same package may lie on the path twice; what it offers is called once.
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
    """What `option` names: one of ours, or one that an installed package offers in `group`.

    Raises ConfigError, with the names that there are. Nobody can take the name of one of ours.
    """
    if name in own:
        return own[name]
    offered = metadata.entry_points(group=group)
    if name not in offered.names:
        known = sorted({*own, *offered.names})
        raise ConfigError(f"{option} is {name!r}, it has to be one of {', '.join(known)}")
    found: _Offered = offered[name].load()
    return found


def _call(point: metadata.EntryPoint) -> None:
    try:
        point.load()()
    except Exception as error:  # Whatever a stranger's code raises: people have to hear whose it was.
        what = " ".join(str(error).split())
        raise PluginError(f"plugin {point.name} ({point.value}): {type(error).__name__}: {what}") from error
