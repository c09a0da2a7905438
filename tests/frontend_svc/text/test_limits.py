"""Breaches of limits: reported together, and no more of them than a status carries."""

from __future__ import annotations

import pytest

from frontend_svc.text.limits import Violations
from triptych_kit.errors import InvalidArgument


def test_a_count_within_its_range_is_fine_and_another_is_noted():
    violations = Violations()
    assert violations.need_count("n", 2, "ids", 0, 2)
    assert not violations.need_count("n", 3, "ids", 0, 2)
    with pytest.raises(InvalidArgument) as caught:
        violations.raise_if_any()
    assert caught.value.violations == [("n", "n has 3 ids, must have at most 2")]


def test_of_very_many_breaches_the_first_are_kept():
    violations = Violations()
    for index in range(100_000):
        violations.add("a", index, "must be something else")
        violations.need(False, "b", index, "must be something else")
        violations.need_count("c", index + 1, "ids", 0, 0)
    with pytest.raises(InvalidArgument) as caught:
        violations.raise_if_any()
    assert len(caught.value.violations) == 64
    assert caught.value.violations[0] == ("a", "a is 0, must be something else")
    assert len(caught.value.message) < 10_000
