"""Datetimes, paths, enums and dataclasses in a state of DCP, without pickle."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest
import torch
from dcp_rounds import ALONE, failing, load, same, save
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import laststep
from laststep.dcp import values
from laststep.errors import CorruptError, MismatchError, UsageError

pytestmark = ALONE


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Schedule:
    name: str
    colour: Colour
    steps: list[int] = field(default_factory=list)
    weights: Any = None


@dataclass
class Longer(Schedule):
    more: Path = Path("x")


@dataclass
class Listing(list[int]):
    """Holds more than its fields."""

    a: int = 3


@dataclass(frozen=True, slots=True)
class Frozen:
    at: datetime
    inner: Any = None


@dataclass(slots=True)
class Slotted:
    a: int


@dataclass
class Cunning:
    """Has a way of its own to be pickled, which would be code."""

    a: int

    def __reduce__(self) -> tuple[Any, ...]:
        return Cunning, (self.a,)


NOW = datetime(2026, 11, 16, 21, 5, 3, 77, tzinfo=UTC)


@pytest.mark.parametrize(
    "value",
    [
        NOW,
        NOW.replace(tzinfo=None),
        date(2026, 1, 2),
        time(1, 2, 3),
        timedelta(-3, 4, 5),
        NOW.astimezone(timezone(timedelta(hours=5, minutes=30))),
        UTC,
        timezone(timedelta(hours=1), "here"),
        Path("a/b"),
        Path("/"),
        PurePosixPath("x"),
        PureWindowsPath("c:/x"),
        (1, [NOW, {"p": Path("q")}]),
    ],
    ids=repr,
)
def test_values_of_the_standard_library_come_back(tmp_path: Path, value: object) -> None:
    save({"state": {"value": value}}, tmp_path)
    into: dict[str, Any] = {"state": {"value": None}}
    load(into, tmp_path)
    assert repr(into["state"]["value"]) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Colour.BLUE,
        Level.LOW,
        Access.READ | Access.WRITE,
        Schedule("warm", Colour.BLUE, [1, 2]),
        Longer("longer", Colour.RED),
        Frozen(NOW, Slotted(3)),
        (Slotted(1), Colour.RED),
    ],
    ids=repr,
)
def test_enums_and_dataclasses_come_back_where_their_classes_are_known(
    tmp_path: Path, value: object
) -> None:
    save({"state": {"value": value}}, tmp_path)
    into: dict[str, Any] = {"state": {"value": None}}
    with failing(UsageError, "types="):
        load(into, tmp_path)
    load(into, tmp_path, types=[Colour, Level, Access, Schedule, Longer, Frozen, Slotted])
    assert same(into["state"]["value"], value)


def test_a_class_that_the_state_has_need_not_be_named(tmp_path: Path) -> None:
    """DCP itself takes out of a state what is neither a number nor text; planners may keep it."""

    class Keeping(DefaultLoadPlanner):
        def create_local_plan(self) -> Any:
            self.state_dict["own"] = Slotted(0)
            return super().create_local_plan()

    save({"level": Level.LOW, "own": Slotted(1)}, tmp_path)
    into: dict[str, Any] = {"level": Level.LOW, "own": None}
    load(into, tmp_path, planner=Keeping())
    assert same(into, {"level": Level.LOW, "own": Slotted(1)})


def test_a_dataclass_may_hold_tensors(tmp_path: Path) -> None:
    save({"s": {"value": Schedule("x", Colour.RED, [], torch.arange(3))}}, tmp_path)
    into: dict[str, Any] = {"s": {"value": None}}
    load(into, tmp_path, types=[Schedule, Colour])
    assert same(into["s"]["value"].weights, torch.arange(3))
    plain: Any = laststep.load(tmp_path)
    assert plain["s"]["value"]["~type"] == "dataclass"
    assert plain["s"]["value"]["fields"]["name"] == "x"


@pytest.mark.parametrize("value", [Cunning(1), Listing([1])])
def test_a_class_that_pickles_in_its_own_way_is_refused(tmp_path: Path, value: object) -> None:
    with failing(UsageError, "allow_pickle=True"):
        save({"own": (value,)}, tmp_path)


def test_a_dataclass_with_other_fields_now_is_told(tmp_path: Path) -> None:
    save({"own": Slotted(1)}, tmp_path)

    @dataclass
    class Other:
        b: int

    Other.__module__, Other.__qualname__ = Slotted.__module__, Slotted.__qualname__
    with failing(MismatchError):
        load({"own": None}, tmp_path, types=[Other])


@pytest.mark.parametrize(
    "tree",
    [
        {"~type": "os.system", "value": "x"},
        {"~type": "datetime", "value": 3},
        {"~type": "timezone"},
        {"~type": "timedelta", "value": [10**30, 0, 0]},
    ],
    ids=repr,
)
def test_what_a_file_says_makes_nothing_else(tree: object) -> None:
    with pytest.raises(CorruptError):
        values.rebuilt(tree, {}, fqn="n")


def test_a_dict_that_looks_like_a_described_value_comes_back(tmp_path: Path) -> None:
    state = {"own": ({"~type": "datetime", "value": "x"},)}
    save(state, tmp_path)
    into: dict[str, Any] = {"own": None}
    load(into, tmp_path)
    assert same(into, state)
