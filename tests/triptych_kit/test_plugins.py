from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.triptych_kit.plugin_folder import write_plugin
from triptych_kit.plugins import PluginError, load_plugins

GROUP = "triptych.test_plugins"


def notes(folder: Path) -> list[str]:
    diary = folder / "diary"
    return diary.read_text().split() if diary.exists() else []


def install(folder: Path, name: str, body: str = "") -> None:
    diary = str(folder / "diary")
    source = f"def start():\n    with open({diary!r}, 'a') as diary: diary.write('{name} ')\n{body}"
    write_plugin(folder, name, source, group=GROUP)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("second", "first", "third"):
        install(tmp_path, name)
        # Of another test's folder.
        monkeypatch.delitem(sys.modules, f"plugin_{name}", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "called"),
    [
        (("all",), ["first", "second", "third"]),
        (("third", "first"), ["first", "third"]),
        ((), []),
    ],
    ids=["all", "some", "none"],
)
def test_those_that_are_wanted_are_called_once_in_the_order_of_their_names(installed, wanted, called):
    assert load_plugins(wanted, group=GROUP) == called
    assert notes(installed) == called


def test_one_that_is_not_installed_is_named_before_any_is_called(installed: Path) -> None:
    with pytest.raises(PluginError, match="fourth is not installed; installed are first, second, third"):
        load_plugins(("first", "fourth"), group=GROUP)
    assert notes(installed) == []


def test_where_none_is_installed_all_is_none() -> None:
    assert load_plugins(("all",), group="triptych.no_such_group") == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    raise ValueError('no\\nroom')\n", "ValueError: no room"),
        ("import no_such_module_of_anybody\n", "ModuleNotFoundError: No module named"),
        ("start = 5\n", "TypeError: 'int' object is not callable"),
    ],
    ids=["raises", "cannot be imported", "is no function"],
)
def test_one_that_fails_is_named_in_one_line(installed: Path, body: str, reason: str) -> None:
    name = f"bad_{reason.split(':')[0]}"
    install(installed, name, body)
    with pytest.raises(PluginError) as caught:
        load_plugins((name,), group=GROUP)
    assert str(caught.value).startswith(f"plugin {name} (plugin_{name}:start): {reason}")
    assert "\n" not in str(caught.value)
