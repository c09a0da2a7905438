from __future__ import annotations

from typing import Any

import pytest

from service_kit.values import ValueType, parse_size, parse_text, parse_yaml, value_type


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("16k", 16_000),
        ("16K", 16_384),
        ("2m", 2_000_000),
        ("2M", 2 * 1024**2),
        ("1.5GiB", 3 * 512 * 1024**2),
        ("1.5 GiB", 3 * 512 * 1024**2),
        ("25.6k", 25_600),
        ("2kB", 2_000),
        ("2MB", 2_000_000),
        ("1T", 1024**4),
        ("7B", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "k", "-1", "1.5", "1.0001k", "2iB", "1e3", "2 M B", "\u0663", "1,000"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a"):
        parse_size(text)


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (int, ValueType(int)),
        (str | None, ValueType(str, is_optional=True)),
        (tuple[int, ...], ValueType(int, is_list=True)),
    ],
)
def test_annotations(annotation: Any, expected: ValueType) -> None:
    assert value_type(annotation) == expected


@pytest.mark.parametrize("annotation", [list[int], int | str, dict[str, int], bytes, tuple[int, int]])
def test_annotations_an_option_cannot_have(annotation: Any) -> None:
    with pytest.raises(TypeError, match="an option cannot have the type"):
        value_type(annotation)


def test_a_number_in_yaml_can_be_a_name() -> None:
    assert parse_yaml(7, ValueType(str)) == "7"


def test_text_in_yaml_is_read_as_on_a_command_line() -> None:
    assert parse_yaml("1, 2", ValueType(int, is_list=True)) == (1, 2)
    assert parse_yaml(["1", 2], ValueType(int, is_list=True)) == (1, 2)


def test_infinity_is_a_float_python_knows() -> None:
    assert parse_text("inf", ValueType(float)) == float("inf")


def test_what_is_not_a_number_is_no_value_of_an_option() -> None:
    # It is neither below a limit nor above it, so that no check of a range would find it.
    with pytest.raises(ValueError, match="'nan' is not a number"):
        parse_text("nan", ValueType(float))
    with pytest.raises(ValueError, match="nan is not a number"):
        parse_yaml(float("nan"), ValueType(float))
