"""Dicts that hold objects beside plain entries: what they hold at the save is what is stored."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import laststep
from expect import warned
from laststep.settings import as_keywords
from laststep.state.items import providers_for
from laststep.state.optimizers import OptimizerProvider

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def schedule(steps: int = 0) -> lr_scheduler.StepLR:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    made = lr_scheduler.StepLR(optimizer, 3)
    for _ in range(steps):
        optimizer.step()
        made.step()
    return made


class Session:
    """A run with an item `extra` that is a dict with a schedule in it."""

    def __init__(self, run: Path, **entries: Any) -> None:
        self.run = run
        self.extra: dict[Any, Any] = {"schedule": schedule(), "epoch": 0, **entries}
        self.checkpointer = laststep.Checkpointer(
            run,
            extra=self.extra,
            options=laststep.Options(flush="thread", progress=False),
            host_memory_bytes=64 << 20,
        )
        self._step = 0

    def stored(self) -> Any:
        self.checkpointer.save(self._step).wait()
        self._step += 1
        return laststep.load(self.run)["extra"]


@pytest.fixture
def session(tmp_path: Path) -> Any:
    made = Session(tmp_path / "run")
    with made.checkpointer:
        yield made


def test_entries_that_came_later_are_stored(session: Session) -> None:
    assert set(session.stored()) == {"schedule", "epoch"}
    session.extra |= {"best": 0.5, "average": torch.ones(3), "epoch": 7, 4: "four"}
    session.extra["model"] = nn.Linear(2, 1)
    stored = session.stored()
    assert list(stored) == ["schedule", "epoch", "best", "average", 4, "model"]
    assert (stored["best"], stored["epoch"], stored[4]) == (0.5, 7, "four")
    assert torch.equal(stored["average"], torch.ones(3))
    assert torch.equal(stored["model"]["weight"], session.extra["model"].weight)


def test_entries_that_went_are_not_stored(session: Session) -> None:
    session.stored()
    del session.extra["epoch"]
    assert set(session.stored()) == {"schedule"}
    del session.extra["schedule"]
    assert session.stored() == {}


def test_what_stands_under_a_key_at_the_save_is_stored(session: Session) -> None:
    session.stored()
    session.extra["schedule"] = schedule(steps=4)
    session.extra["epoch"] = nn.Linear(2, 2)
    stored = session.stored()
    assert stored["schedule"]["last_epoch"] == 4
    assert torch.equal(stored["epoch"]["weight"], session.extra["epoch"].weight)
    session.extra["schedule"] = None
    assert session.stored()["schedule"] is None


def test_a_plain_dict_inside_may_come_to_hold_an_object(tmp_path: Path) -> None:
    session = Session(tmp_path / "run", more={"epoch": 1})
    with session.checkpointer:
        session.stored()
        session.extra["more"]["schedule"] = schedule(steps=2)
        assert session.stored()["more"]["schedule"]["last_epoch"] == 2
        session.extra["more"]["schedule"] = schedule(steps=5)
        assert session.stored()["more"]["schedule"]["last_epoch"] == 5


def test_an_optimizer_finds_the_names_of_a_module_that_was_put_there_later(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0, momentum=0.9)
    session = Session(tmp_path / "run", model=nn.Linear(2, 2), optimizer=optimizer)
    with session.checkpointer:
        session.stored()
        model = session.extra["model"] = nn.Linear(2, 2)
        session.extra["optimizer"] = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        session.extra["optimizer"].step()
        assert set(session.stored()["optimizer"]["state"]) == {"weight", "bias"}


def test_providers_of_things_that_stay_are_kept(session: Session) -> None:
    session.extra["model"] = nn.Linear(2, 2)
    session.stored()
    provider = session.checkpointer._context.providers["extra"]
    before = provider._members["model"]
    session.extra["epoch"] = 5
    session.stored()
    assert provider._members["model"] is before


def test_a_member_is_asked_once_where_all_its_tensors_go(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    where = OptimizerProvider.destinations

    def counted(self: OptimizerProvider, paths: list[tuple[object, ...]]) -> list[object]:
        asked.append(len(paths))
        return where(self, paths)

    monkeypatch.setattr(OptimizerProvider, "destinations", counted)
    model = nn.Linear(2, 2)
    group = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "n": 1}
    provider = providers_for({"group": group})["group"]
    moments = [("optimizer", "state", name, "exp_avg") for name in ("weight", "bias")]
    found = provider.destinations([moments[0], (), ("gone",), moments[1], ("n",)])
    assert found[1:3] + found[4:] == ["cpu"] * 3
    assert (found[0] is model.weight, found[3] is model.bias) == (True, True)
    assert asked == [2]


def test_whether_code_of_others_runs_follows_what_the_dict_holds(session: Session) -> None:
    class Counter:
        def state_dict(self) -> dict[str, Any]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    provider = session.checkpointer._context.providers["extra"]
    assert provider.passive
    session.extra["counter"] = Counter()
    assert not provider.passive
    del session.extra["counter"]
    assert provider.passive


def test_plain_entries_that_came_after_the_checkpoint_go_with_a_warning(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    session.stored()
    session.extra |= {"best": 0.5, "epoch": 9}
    with caplog.at_level(logging.WARNING, "laststep"):
        session.checkpointer.restore()
    assert warned(caplog, "extra", "best")
    assert set(session.extra) == {"schedule", "epoch"}
    assert session.extra["epoch"] == 0


def test_a_dict_inside_from_which_all_objects_have_gone_is_a_plain_entry(session: Session) -> None:
    session.stored()
    session.extra["more"] = {"schedule": schedule(), "n": 1}
    assert not session.checkpointer._context.providers[
        "extra"
    ].mixed  # which looks at what is inside
    del session.extra["more"]["schedule"]
    session.checkpointer.restore()
    assert set(session.extra) == {"schedule", "epoch"}


def test_plain_entries_that_came_after_the_checkpoint_stay_if_not_strict(session: Session) -> None:
    session.stored()
    session.extra |= {"best": 0.5, "epoch": 9}
    problems = session.checkpointer.restore(strict=False).problems
    assert problems.missing == ("extra/best",)
    assert (session.extra["best"], session.extra["epoch"]) == (0.5, 0)


def test_plain_entries_that_are_stored_come_back(session: Session) -> None:
    session.extra["best"] = 0.5
    session.stored()
    del session.extra["best"], session.extra["epoch"]
    session.checkpointer.restore()
    assert (session.extra["best"], session.extra["epoch"]) == (0.5, 0)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (schedule, ("extra/new",)),
        (nn.ReLU, ("extra/new",)),
        (lambda: nn.Linear(1, 1), ("extra/new/weight", "extra/new/bias")),
        (lambda: torch.optim.SGD([nn.Parameter(torch.ones(1))]), ("extra/new",)),
        (lambda: {"more": schedule(), "n": 1}, ("extra/new/more",)),
    ],
    ids=["schedule", "empty", "module", "optimizer", "nested"],
)
def test_an_object_that_is_not_stored_is_missing_and_stays(
    session: Session, make: Callable[[], object], names: tuple[str, ...]
) -> None:
    session.stored()
    new = session.extra["new"] = make()
    with pytest.raises(laststep.MismatchError) as caught:
        session.checkpointer.restore()
    assert caught.value.problems.missing == names
    assert caught.value.problems.mismatched == caught.value.problems.unexpected == ()
    session.extra["epoch"] = 9
    session.checkpointer.restore(strict=False)
    assert session.extra["new"] is new
    assert session.extra["epoch"] == 0


@pytest.mark.parametrize(
    ("make", "names"),
    [(schedule, {"extra/old"}), (lambda: nn.Linear(1, 1), {"extra/old/weight", "extra/old/bias"})],
    ids=["schedule", "module"],
)
def test_a_stored_object_that_is_not_live_is_unexpected_and_no_plain_entry(
    session: Session, make: Callable[[], object], names: set[str]
) -> None:
    session.extra["old"] = make()
    session.stored()
    del session.extra["old"]
    with pytest.raises(laststep.MismatchError) as caught:
        session.checkpointer.restore()
    assert set(caught.value.problems.unexpected) == names
    session.checkpointer.restore(strict=False)
    assert "old" not in session.extra


def test_a_mark_that_two_checkpointers_share_has_a_provider_in_each(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    mark = laststep.PerRank(optimizer)
    settings: Any = {"flush": "thread", "host_memory_bytes": 64 << 20, "progress": False}
    with (
        laststep.Checkpointer(
            tmp_path / "a", model=model, optimizer=mark, **as_keywords(settings)
        ) as first,
        laststep.Checkpointer(tmp_path / "b", optimizer=mark, **as_keywords(settings)) as second,
    ):
        first.save(0)
        second.save(0)
    names = [set(laststep.load(tmp_path / run)["optimizer"]["state"]) for run in "ab"]
    assert names == [{"weight", "bias"}, {"group0.0", "group0.1"}]
