"""Folder names: one name for each attempt, one attempt for each name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.catalog.attempt import AttemptName, parse_folder
from laststep.catalog.terms import parse_term

_numbers = st.integers(min_value=1, max_value=10**20 - 1)


@given(step=st.integers(min_value=0, max_value=10**20 - 1), term=_numbers, attempt=_numbers)
def test_a_folder_name_survives_the_round_trip(step: int, term: int, attempt: int) -> None:
    name = parse_folder(AttemptName(step=step, term=term, attempt=attempt).folder)
    assert name is not None
    assert (name.step, name.term, name.attempt) == (step, term, attempt)


@given(st.text(alphabet="step-0123456789.tmpx\n٣", max_size=40))
def test_whatever_parses_is_written_the_same_way_again(text: str) -> None:
    name = parse_folder(text)
    assert name is None or name.folder == text


def test_the_documented_name_is_the_name() -> None:
    assert AttemptName(step=100, term=3, attempt=17).folder == "step-00000100.3-17"


@pytest.mark.parametrize(
    "folder",
    [
        "step-100.3-17",
        "step-000000100.3-17",
        "step-00000100.03-17",
        "step-00000100.3-017",
        "step-00000100.0-1",
        "step-00000100.1-0",
        "step-00000100.3-17\n",
        "step--0000100.3-17",
        "step-00000100.3-17.tmp-a1",
        "xstep-00000100.3-17",
        "step-0000010٣.3-17",
        "",
        "terms",
    ],
)
def test_a_name_of_another_shape_is_not_an_attempt(folder: str) -> None:
    assert parse_folder(folder) is None


def test_epoch_files_are_told_from_everything_else() -> None:
    assert parse_term("00000003.json", "json") == 3
    assert parse_term("00000003.json", "lock") is None
    assert parse_term("00000000.json", "json") is None
    assert parse_term("000000003.json", "json") is None
    assert parse_term("00000003.json.tmp-0011", "json") is None
