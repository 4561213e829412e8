"""Durations, as users write them and as messages show them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.constants import DURATION, UNITS_S, duration_s, duration_text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10 min", 600.0),
        ("10min", 600.0),
        ("1.5 h", 5400.0),
        ("90s", 90.0),
        ("0.25 s", 0.25),
        ("2 d", 172800.0),
    ],
)
def test_a_duration_has_a_number_and_a_unit(text: str, seconds: float) -> None:
    assert re.fullmatch(DURATION, text)
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["10", "min", "10 m", "10 minutes", "0 s", "0.0h", "-1 s", "1  s", ""]
)
def test_what_is_none_is_not_taken_for_one(text: str) -> None:
    assert re.fullmatch(DURATION, text) is None


@given(st.floats(0.001, 1e9), st.sampled_from(sorted(UNITS_S)))
def test_a_duration_is_shown_to_three_digits_in_a_unit_that_can_be_read(
    number: float, unit: str
) -> None:
    seconds = number * UNITS_S[unit]
    shown, units = duration_text(seconds), {**UNITS_S, "ms": 0.001}
    value, its_unit = shown.split()
    assert float(value) * units[its_unit] == pytest.approx(seconds, rel=0.01)
