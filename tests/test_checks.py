"""Values against declared types: what fits comes back as that type, all else is told by it."""

from __future__ import annotations

import threading
from enum import Enum, StrEnum
from typing import Annotated, Literal

import msgspec
import numpy as np
import pytest

from expect import raises
from laststep.checks import Checked, allowed, checked, seconds
from laststep.errors import UsageError


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


Few = Annotated[int, msgspec.Meta(ge=1, le=9)]
Counted = Annotated[int, msgspec.Meta(ge=0)]
Span = Annotated[float, msgspec.Meta(gt=0, lt=1e6)]


class OwnInt(int): ...


class OwnFloat(float): ...


class OwnStr(str):
    __slots__ = ()


class Shade(str, Enum):  # noqa: UP042 (str() of a member is its name, unlike a StrEnum's)
    BLUE = "blue"


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError


class Sample(Checked, frozen=True, kw_only=True):
    few: Few = 3
    colour: Colour = Colour.RED


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, "int"),
        (Few, "1 to 9"),
        (Counted, "0"),
        (Span, "1000000"),
        (float | None, "None"),
        (bool, "True"),
        (str, "str"),
        (Colour, "'red', 'blue'"),
        (Literal["a"] | None, "'a'"),
    ],
    ids=str,
)
def test_a_type_says_what_a_value_may_be(kind: object, words: str) -> None:
    assert words in allowed(kind)


@pytest.mark.parametrize(
    ("value", "kind", "plain"),
    [
        (np.int64(3), Few, 3),
        (np.bool_(True), bool, True),
        (np.float32(0.5), Span, 0.5),
        (OwnInt(3), Few, 3),
        (OwnFloat(0.5), Span, 0.5),
        (OwnStr("a"), str, "a"),
        (np.str_("a"), str, "a"),
        (Shade.BLUE, str, "blue"),
        (Shade.BLUE, Colour, Colour.BLUE),
        (2, Span, 2.0),
        ("blue", Colour, Colour.BLUE),
        (None, bool | None, None),
    ],
    ids=str,
)
def test_a_value_that_fits_comes_back_as_its_type(
    value: object, kind: object, plain: object
) -> None:
    made = checked("it", value, kind)
    assert made == plain
    assert type(made) is type(plain)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (0, Few),
        (True, Few),
        (3.0, Few),
        ("3", Few),
        (np.float64(3), Few),
        (1, bool),
        (float("nan"), Span),
        (0, Span),
        (np.array([1, 2]), Few),
        ("green", Colour),
        (3, Colour),
    ],
    ids=str,
)
def test_a_value_that_does_not_fit_is_told_by_name_type_and_value(
    value: object, kind: object
) -> None:
    with raises(UsageError, "it") as caught:
        checked("it", value, kind)
    assert caught.value.expected == allowed(kind)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (1 << 70, Counted, str(1 << 62)),
        ("", str | None, "str or None"),
        (Unshowable(), Few, allowed(Few)),
    ],
    ids=["huge", "empty", "unshowable"],
)
def test_what_could_not_be_stored_or_shown_is_told_as_well(
    value: object, kind: object, words: str
) -> None:
    with raises(UsageError, "it") as caught:
        checked("it", value, kind)
    assert words in caught.value.expected


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e10, 10**12, OwnFloat(1e300)], ids=str)
def test_one_may_wait_longer_than_the_system_can(timeout_s: float) -> None:
    assert seconds(timeout_s) == threading.TIMEOUT_MAX
    lock = threading.Lock()
    assert lock.acquire(timeout=seconds(timeout_s))


def test_a_struct_holds_what_was_checked() -> None:
    sample = Sample(few=np.int8(4), colour="blue")
    assert (type(sample.few), sample.colour) == (int, Colour.BLUE)
    with raises(UsageError, "few", found="10"):
        Sample(few=10)
