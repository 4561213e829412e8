"""What fits and what does not: other classes, entries that came later, memory that repeats."""

from __future__ import annotations

import copy
import logging
from collections import deque
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import laststep
from expect import names, raises
from laststep.codecs import objects
from laststep.codecs.objects import Tagged
from laststep.state.collecting import CollectCache, collect
from laststep.state.provider import has_absent
from laststep.state.tree import Owned, owners

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Carry = "Callable[..., laststep.Restored]"


def optimizer(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(2))], lr=1.0)


class MyStep(lr_scheduler.StepLR):
    """A user's own."""


class Renamed(lr_scheduler.LambdaLR):
    """A user's own, in one version of a program."""


class RenamedSince(lr_scheduler.LambdaLR):
    """The same, in the next."""


def test_a_schedule_of_another_class_does_not_fit(carry: Carry) -> None:
    stored = lr_scheduler.StepLR(optimizer(), 3, gamma=0.5)
    live = lr_scheduler.ExponentialLR(optimizer(), 0.9)
    before = dict(live.state_dict())
    with pytest.raises(laststep.MismatchError) as caught:
        carry({"schedule": stored}, {"schedule": live})
    (told,) = caught.value.problems.mismatched
    assert names(told, "schedule", "ExponentialLR", "StepLR")
    assert live.state_dict() == before
    count = {"n": 1}  # where nothing at all fits, nothing is restored
    restored = carry(
        {"schedule": stored, "count": count}, {"schedule": live, "count": count}, strict=False
    )
    assert restored.problems.mismatched == (told,)
    assert live.state_dict() == before


def test_a_schedule_that_consists_of_others_does_not_fit(carry: Carry) -> None:
    def warm_up_and(other: Callable[..., object]) -> object:
        made = optimizer()
        parts = [lr_scheduler.LinearLR(made), other(made)]
        return lr_scheduler.SequentialLR(made, parts, [2])

    stored = warm_up_and(lambda o: lr_scheduler.ExponentialLR(o, 0.9))
    with pytest.raises(laststep.MismatchError) as caught:
        carry({"s": stored}, {"s": warm_up_and(lambda o: lr_scheduler.CosineAnnealingLR(o, 9))})
    (told,) = caught.value.problems.mismatched
    assert names(
        told, "SequentialLR(LinearLR, CosineAnnealingLR)", "SequentialLR(LinearLR, ExponentialLR)"
    )


@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (lambda o: lr_scheduler.StepLR(o, 3), lambda o: MyStep(o, 3)),
        (lambda o: Renamed(o, lambda _: 1.0), lambda o: RenamedSince(o, lambda _: 1.0)),
    ],
)
def test_a_class_of_the_users_may_be_renamed(
    stored: Callable[..., object], live: Callable[..., object], carry: Carry
) -> None:
    source, target = stored(optimizer()), live(optimizer())
    for schedule in (source, source):
        schedule.optimizer.step()
        schedule.step()
    carry({"schedule": source}, {"schedule": target})
    assert target.last_epoch == 2


class Stateful:
    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class StatefulSince(Stateful):
    """Another name."""


def test_objects_that_are_none_of_torchs_are_not_told_apart(carry: Carry) -> None:
    target = StatefulSince(0)
    carry({"thing": Stateful(7)}, {"thing": target})
    assert target.n == 7


def test_a_scaler_is_not_taken_for_a_schedule(carry: Carry) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    live = lr_scheduler.StepLR(optimizer(), 3)
    with raises(laststep.MismatchError, "amp", "StepLR", "GradScaler"):
        carry({"amp": scaler}, {"amp": live})
    scaler.scale(torch.ones(1))  # now its state is tensors
    with raises(laststep.MismatchError, "amp", "StepLR", "GradScaler"):
        carry({"amp": scaler}, {"amp": live})
    assert live.last_epoch == 0


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.GradScaler:FutureWarning")
@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler is enabled")
def test_a_scaler_by_its_older_name_is_the_same(carry: Carry) -> None:
    older = torch.cuda.amp.GradScaler(init_scale=8.0)
    target = torch.amp.GradScaler("cpu")
    carry({"amp": older}, {"amp": target})


def test_an_optimizer_of_another_class_is_left_alone_though_its_state_looks_alike(
    carry: Carry,
) -> None:
    def trained(kind: type[torch.optim.Optimizer]) -> torch.optim.Optimizer:
        made = optimizer(kind)
        made.param_groups[0]["params"][0].sum().backward()
        made.step()
        return made

    stored, live = trained(torch.optim.Adam), trained(torch.optim.AdamW)
    stored.param_groups[0]["lr"] = 0.5
    parameter = live.param_groups[0]["params"][0]
    live.state[parameter]["exp_avg"].fill_(7)
    count = {"n": 1}
    restored = carry(
        {"optimizer": stored, "count": count}, {"optimizer": live, "count": count}, strict=False
    )
    (told,) = restored.problems.mismatched
    assert names(told, "optimizer", "AdamW", "Adam")
    assert live.param_groups[0]["lr"] == 1.0
    assert live.state[parameter]["exp_avg"].tolist() == [7, 7]


def test_a_part_of_a_group_of_another_class_is_left_alone_and_the_rest_is_restored(
    carry: Carry,
) -> None:
    def make(schedule: object, n: float) -> dict[str, object]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model.weight, n)
        return {"model": model, "inner": {"schedule": schedule}, "n": n}

    source = make(lr_scheduler.StepLR(optimizer(), 3), 1.0)
    target = make(lr_scheduler.ExponentialLR(optimizer(), 0.9), 2.0)
    before = dict(target["inner"]["schedule"].state_dict())
    with raises(laststep.MismatchError, "inner['schedule']", "ExponentialLR", "StepLR"):
        carry({"all": source}, {"all": target})
    restored = carry({"all": source}, {"all": target}, strict=False)
    assert len(restored.problems) == 1
    assert target["model"].weight.item() == 1.0
    assert target["n"] == 1.0
    assert target["inner"]["schedule"].state_dict() == before


def test_what_was_handed_over_is_what_load_gives(tmp_path: Path) -> None:
    """The class travels beside the state, not in it."""
    schedule = lr_scheduler.StepLR(optimizer(), 3)
    laststep.save(schedule, tmp_path / "one")
    assert laststep.load(tmp_path / "one") == schedule.state_dict()


def test_a_known_state_keeps_its_owner_on_the_quick_way() -> None:
    state = {"a": Owned("Adam", {"t": torch.zeros(2), "lr": 0.1}), "b": Owned("StepLR", {"n": 1})}
    cache = CollectCache()
    first = collect(state, cache=cache)
    assert cache.last is not None
    state["b"].state["n"] = 2
    second = collect(state, cache=cache)
    assert second.pieces is first.pieces  # nothing was taken apart anew
    assert owners(second.tree) == owners(first.tree) == {("a",): "Adam", ("b",): "StepLR"}
    assert collect(Owned("A", state), cache=CollectCache()).pieces == first.pieces
    assert collect(Owned("A", 3), cache=cache).tree == Tagged("owned", ["A", 3])


@pytest.mark.parametrize("value", [None, ["StepLR"], [3, {}], "StepLR"])
def test_an_owner_that_makes_no_sense_is_damage(value: object) -> None:
    tree = objects.decode(objects.encode({"a": Tagged("owned", value)}), where="here")
    with raises(laststep.CorruptError, found=True):
        owners(tree)


def nested(n: int) -> dict[str, object]:
    return {
        "n": n,
        "deep": {"a": n, "list": [{"x": n}], "tuple": ({"y": n},)},
        "t": torch.full((2,), float(n)),
    }


def test_entries_that_came_after_the_checkpoint_go(
    carry: Carry, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = nested(1), nested(2)
    target["later"] = "x"
    target["deep"].update(b=2, c={"d": 3})
    target["deep"]["list"][0]["z"] = 2
    target["deep"]["tuple"][0][5] = 2
    deep = target["deep"]
    carry({"state": source}, {"state": target})
    assert target["deep"] is deep
    tensor = target.pop("t")
    assert tensor.tolist() == source.pop("t").tolist()
    assert target == source
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert names(warning, "state", "deep/list/#0/z, deep/tuple/#0/#5, deep/b", "strict=False")


def test_entries_that_came_after_the_checkpoint_stay_where_only_what_fits_is_restored(
    carry: Carry, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = nested(1), nested(2)
    target["later"] = "x"
    target["deep"]["b"] = {"c": 3}
    target["new"] = torch.zeros(1)
    restored = carry({"state": source}, {"state": target}, strict=False)
    assert set(restored.problems.missing) == {"state/later", "state/deep/b", "state/new"}
    assert len(restored.problems) == 3
    assert target["later"] == "x"
    assert target["new"].tolist() == [0]
    assert target["deep"] == {**source["deep"], "b": {"c": 3}}
    assert target["n"] == 1
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "state/new" in warning


def test_entries_that_came_after_the_checkpoint_stay_in_a_partial_restore(carry: Carry) -> None:
    source, target = nested(1), nested(2)
    source["empty"], target["empty"] = {}, {"a": 1}
    target["later"] = "x"
    target["deep"]["b"] = 3
    carry({"state": source}, {"state": target}, only=["state/t"])
    assert target["t"].tolist() == [1, 1]
    assert target["later"] == "x"
    assert target["empty"] == {"a": 1}
    assert target["deep"] == {**nested(2)["deep"], "b": 3}


def test_a_rollback_takes_back_what_was_noted_meanwhile(tmp_path: Path) -> None:
    history: dict[str, object] = {"loss": {0: 1.0}}
    with laststep.Checkpointer(
        tmp_path / "run", history=history, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0).wait()
        history["loss"][1] = 0.5
        history["note"] = "diverged"
        checkpointer.restore(0)
    assert history == {"loss": {0: 1.0}}


def test_a_provider_of_ones_own_is_told_what_was_not_restored(carry: Carry) -> None:
    class Mine(laststep.StateProvider):
        def __init__(self, state: dict[str, object]) -> None:
            self.state = state
            self.restored: object = None

        def describe(self) -> laststep.State:
            return laststep.State(value=self.state)

        def restore(self, value: object) -> None:
            self.restored = value

    target = Mine({"a": 2, "b": 2})
    restored = carry({"mine": Mine({"a": 1})}, {"mine": target}, strict=False)
    assert target.restored == {"a": 1, "b": laststep.ABSENT}
    assert restored.problems.missing == ("mine/b",)


def test_a_live_tensor_that_repeats_its_memory_is_found_before_anything_is_touched(
    carry: Carry,
) -> None:
    source = {"first": torch.ones(3), "wide": torch.arange(3.0).reshape(3, 1) * torch.ones(1, 4)}
    target = {"first": torch.zeros(3), "wide": torch.zeros(3, 1).expand(3, 4)}
    with raises(laststep.MismatchError, "state/wide"):
        carry({"state": source}, {"state": target})
    assert target["first"].tolist() == [0, 0, 0]
    restored = carry({"state": source}, {"state": target}, strict=False)
    assert len(restored.problems) == 1
    assert target["first"].tolist() == [1, 1, 1]
    assert not target["wide"].any()


def test_dimensions_of_one_element_do_not_count_as_repeated(carry: Carry) -> None:
    target = {"t": torch.zeros(3).expand(1, 3), "none": torch.zeros(1).expand(0)}
    carry({"s": {"t": torch.ones(1, 3), "none": torch.zeros(0)}}, {"s": target})
    assert target["t"].tolist() == [[1, 1, 1]]


def full(number: float) -> torch.Tensor:
    return torch.full((3,), float(number))


CHANGED = [
    pytest.param({"n": 1}, 5, id="a dict, here a number"),
    pytest.param((1, 2), (1, 2, 3), id="a tuple of another length"),
    pytest.param([1, 2], {"k": [3]}, id="a list, here a dict"),
    pytest.param({"w": full(2), "k": 1}, None, id="tensors, here nothing"),
    pytest.param((), 0.9, id="an empty tuple, here a number"),
    pytest.param([], [1, 2, 3], id="an empty list"),
    pytest.param([[], [1]], [[5], [6], [7]], id="an empty list in a list"),
    pytest.param(deque(maxlen=3), deque([1, 2], maxlen=3), id="an empty deque"),
    pytest.param({}, {"k": 1}, id="an empty dict"),
    pytest.param(lr_scheduler.StepLR(optimizer(), 3), {"k": 1}, id="a schedule, here a dict"),
    pytest.param({"k": full(2), "l": 2}, {"m": full(3)}, id="other keys"),
]
"""What is stored, and what is live."""


@pytest.mark.parametrize(("stored", "live"), CHANGED)
@pytest.mark.parametrize("with_object", [False, True], ids=["plain", "group"])
def test_a_partial_restore_changes_nothing_but_what_it_names(
    carry: Carry, stored: object, live: object, *, with_object: bool
) -> None:
    def item(value: object, number: float) -> dict[str, object]:
        made = {"a": full(number), "other": value}
        return made | {"object": Stateful(3)} if with_object else made

    target = item(copy.deepcopy(live), 0)
    carry({"x": item(stored, 1)}, {"x": target}, only=["x/a"], allow_pickle=True)
    assert torch.equal(target["a"], full(1))
    assert repr(target["other"]) == repr(live)


@pytest.mark.parametrize("live", [None, 5, [5], {"k": 4}, (1, 2)])
def test_what_does_not_fit_never_makes_half_a_value_of_a_live_one(
    carry: Carry, live: object, tmp_path: Path
) -> None:
    """Half of what is stored has nowhere to go, and nothing may come in the place of that."""
    for stored in ({"w": full(2), "k": 1}, (full(2), 1)):
        target = {"a": full(0), "other": copy.deepcopy(live)}
        restored = carry({"x": {"a": full(1), "other": stored}}, {"x": target}, strict=False)
        assert restored.problems.unexpected
        assert torch.equal(target["a"], full(1))
        assert not has_absent(target)
        if type(live) is not type(stored):
            assert target["other"] == live
    laststep.save({"a": full(1), "x": {"w": full(2), "k": 1}}, tmp_path / "folder")
    into = {"a": full(0), "x": None}
    laststep.load(tmp_path / "folder", into=into, strict=False)
    assert into["x"] is None


def test_a_module_that_is_switched_off_in_this_start_stays_off(carry: Carry) -> None:
    target = {"model": torch.nn.Linear(2, 2), "average": None}
    source = {"model": torch.nn.Linear(2, 2), "average": torch.nn.Linear(2, 2)}
    restored = carry({"x": source}, {"x": target}, strict=False)
    assert set(restored.problems.unexpected) == {"x/average/weight", "x/average/bias"}
    assert target["average"] is None


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_what_stands_for_nothing_is_never_saved(tmp_path: Path, *, allow_pickle: bool) -> None:
    for state in ({"x": laststep.ABSENT}, {"x": [Stateful(laststep.ABSENT)]}):
        with pytest.raises(laststep.UsageError):
            laststep.save(state, tmp_path / "folder", allow_pickle=allow_pickle)
    assert copy.deepcopy([laststep.ABSENT])[0] is copy.copy(laststep.ABSENT) is laststep.ABSENT


def schedule(steps: int = 0) -> lr_scheduler.StepLR:
    made = lr_scheduler.StepLR(optimizer(), 3)
    for _ in range(steps):
        made.optimizer.step()
        made.step()
    return made


PLAIN = "StepLR"
OBJECT = "x"


@pytest.mark.parametrize(
    ("stored", "live", "said"),
    [
        (lambda: schedule(2), lambda: 1, PLAIN),
        (lambda: schedule(2), lambda: {"last_epoch": 1}, PLAIN),
        (lambda: schedule(2), lambda: None, "unexpected=('x/o',)"),
        (lambda: 7, schedule, OBJECT),
        (lambda: full(1), schedule, OBJECT),
        (lambda: {"hello": 1}, schedule, OBJECT),
        (lambda: {"last_epoch": 1}, schedule, OBJECT),
        (lambda: None, schedule, OBJECT),
        (lambda: 7, lambda: Stateful(3), OBJECT),
        (lambda: [full(1)], lambda: Stateful(3), OBJECT),
    ],
)
def test_the_state_of_an_object_is_no_plain_value_and_the_other_way_round(
    carry: Carry, stored: Callable[[], object], live: Callable[[], object], said: str
) -> None:
    here, expected = live(), live()
    source = {"s": schedule(3), "o": stored(), "t": full(1)}
    target = {"s": schedule(), "o": here, "t": full(0)}
    with raises(laststep.MismatchError, problems=said) as caught:
        carry({"x": source}, {"x": target})
    assert len(caught.value.problems.mismatched) <= 1
    assert target["s"].last_epoch == 0
    assert torch.equal(target["t"], full(0))  # nothing was touched
    problems = carry({"x": source}, {"x": target}, strict=False).problems
    assert said in str(problems)
    assert target["s"].last_epoch == 3
    assert target["o"] is here
    if hasattr(here, "state_dict"):
        here, expected = here.state_dict(), expected.state_dict()
    assert here == expected


def test_an_item_that_was_an_object_is_no_plain_dict_and_the_other_way_round(carry: Carry) -> None:
    live: dict[str, object] = {}
    with raises(laststep.MismatchError, "x", problems=PLAIN):
        carry({"x": schedule()}, {"x": live})
    with raises(laststep.MismatchError, "x", problems=OBJECT):
        carry({"x": {"hello": 1}}, {"x": schedule()})
    assert not live


def test_a_state_that_was_loaded_and_saved_again_still_fits_its_object(carry: Carry) -> None:
    target = schedule()
    carry({"x": schedule(2).state_dict()}, {"x": target})
    assert target.last_epoch == 2


def test_a_partial_restore_keeps_what_lies_beside_what_it_names(carry: Carry) -> None:
    weight = nn.Parameter(torch.ones(3))
    stepped = torch.optim.SGD([weight], momentum=0.9)
    weight.grad = torch.ones(3)
    stepped.step()
    live = {"state": {"group0.0": {"momentum_buffer": full(0)}}, "mine": 5}
    carry({"x": {"o": stepped}}, {"x": {"o": live}}, only=["x/o/state/group0.0/momentum_buffer"])
    assert torch.equal(live["state"]["group0.0"]["momentum_buffer"], full(1))
    assert live["mine"] == 5
