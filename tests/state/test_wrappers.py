"""Optimizers, schedulers and scalers behind objects of a framework's: what is inside is saved."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import laststep
from expect import names, raises, warned
from laststep.state.items import layers_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Carry = Callable[..., laststep.Restored]


class Wrapped(torch.optim.Optimizer):
    """As Accelerate has it: an optimizer by its class, with the parts of another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Taken(torch.optim.Optimizer):
    """As Fabric has it: the attributes of the other one are its own too."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.__dict__.update(optimizer.__dict__)
        self._optimizer = optimizer


class Delegate:
    """Of no class of torch's; gives the state of what it holds, under any name."""

    def __init__(self, name: str, inner: Any) -> None:
        self._name = name
        setattr(self, name, inner)

    def state_dict(self) -> dict[str, Any]:
        return getattr(self, self._name).state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        getattr(self, self._name).load_state_dict(state)


class Lookahead(torch.optim.Optimizer):
    """Has slow weights of its own beside the state of the one inside."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([p for g in optimizer.param_groups for p in g["params"]], {"alpha": 0.5})
        self.optimizer = optimizer


def plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


def delegated(optimizer: torch.optim.Optimizer) -> Delegate:
    return Delegate("optimizer", optimizer)


def twice(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return Wrapped(Wrapped(optimizer))


WAYS = (Wrapped, Taken, delegated, twice)
PAIRS = [*((way, plain) for way in WAYS), *((plain, way) for way in WAYS), (Wrapped, Wrapped)]


def training(
    kind: type[torch.optim.Optimizer], seed: int, *, steps: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1 + seed)
    for _ in range(steps):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_the_state_goes_from_any_wrapping_to_any_other(
    there: Callable[..., object], here: Callable[..., object], carry: Carry
) -> None:
    model, optimizer = training(torch.optim.AdamW, 0, steps=2)
    other, target = training(torch.optim.AdamW, 1, steps=0)
    carry(
        {"model": model, "optimizer": there(optimizer)}, {"model": other, "optimizer": here(target)}
    )
    assert target.param_groups[0]["lr"] == 0.1
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        for key, entry in optimizer.state[mine].items():
            assert torch.equal(entry, target.state[theirs][key])


@pytest.mark.parametrize(("there", "here"), PAIRS)
def test_the_state_of_one_class_is_not_put_into_another_whatever_is_around_them(
    there: Callable[..., object], here: Callable[..., object], carry: Carry
) -> None:
    model, optimizer = training(torch.optim.AdamW, 0, steps=2)
    other, target = training(torch.optim.SGD, 1, steps=0)
    with pytest.raises(laststep.MismatchError) as caught:
        carry(
            {"model": model, "optimizer": there(optimizer)},
            {"model": other, "optimizer": here(target)},
        )
    (text,) = caught.value.problems.mismatched
    assert names(text, "optimizer", "SGD", "AdamW")
    assert target.param_groups[0]["lr"] == 1.1


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: Delegate("scheduler", s)])
def test_schedules_behind_wrappers_are_told_apart_by_their_classes(
    wrap: Callable[..., object], carry: Carry
) -> None:
    _, optimizer = training(torch.optim.SGD, 0, steps=1)
    step = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    step.last_epoch = 7
    same = torch.optim.lr_scheduler.StepLR(training(torch.optim.SGD, 1, steps=1)[1], 3)
    other = torch.optim.lr_scheduler.ExponentialLR(training(torch.optim.SGD, 1, steps=1)[1], 0.5)
    for stored in (step, Delegate("scheduler", step)):
        carry({"schedule": stored}, {"schedule": wrap(same)})
        assert (same.last_epoch, same.step_size) == (7, 2)
        with raises(laststep.MismatchError, "ExponentialLR"):
            carry({"schedule": stored}, {"schedule": wrap(other)})


def test_a_scaler_behind_a_wrapper_is_the_scaler(carry: Carry) -> None:
    source, target = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    for scaler in (source, target):
        scaler.scale(torch.ones(1))
    carry({"scaler": Delegate("scaler", source)}, {"scaler": target})
    assert target.get_scale() == 8.0
    carry({"scaler": target}, {"scaler": Delegate("scaler", source)})
    assert source.get_scale() == 8.0


def test_a_wrapper_with_a_state_of_its_own_is_not_looked_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ahead = Lookahead(training(torch.optim.AdamW, 0, steps=1)[1])
    assert layers_of(ahead)[-1] is ahead
    assert warned(caplog, "Lookahead", "AdamW")

    class Trainer(Delegate):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": 1, **super().state_dict()}

    trainer = Trainer("scheduler", torch.optim.lr_scheduler.StepLR(ahead.optimizer, 2))
    assert layers_of(trainer)[-1] is trainer
    schedule = trainer.scheduler  # type: ignore[attr-defined]
    assert layers_of(schedule)[-1] is schedule  # though it holds an optimizer


class Slow(Wrapped):
    """Its own state comes with the first step; until then it gives what an empty one gives."""

    state = None  # type: ignore[assignment]
    state_dict = torch.optim.Optimizer.state_dict  # type: ignore[assignment]

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)
        self.state: dict[Any, Any] = {}
        self._optimizer_state_dict_pre_hooks: dict[int, Any] = {}
        self._optimizer_state_dict_post_hooks: dict[int, Any] = {}

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"slow": parameter.detach().clone()}


def test_an_optimizer_whose_state_comes_with_the_first_step_is_not_looked_through(
    tmp_path: Path,
) -> None:
    model, optimizer = training(torch.optim.SGD, 0, steps=0)
    slow = Slow(optimizer)
    assert slow.state_dict() == optimizer.state_dict()
    with laststep.Checkpointer(tmp_path / "run", model=model, optimizer=slow) as run:
        model(torch.ones(2, 3)).sum().backward()
        slow.step()
        run.save(1)
    stored = laststep.load(tmp_path / "run")["optimizer"]["state"]
    assert {tuple(entries) for entries in stored.values()} == {("slow",)}


def test_a_wrapper_that_has_nothing_to_give_yet_is_not_looked_through(tmp_path: Path) -> None:
    class Counting(Delegate):
        def state_dict(self) -> dict[str, Any]:
            return {key: value for key, value in vars(self).items() if key == "count"}

    counting = Counting("scaler", torch.amp.GradScaler("cpu", enabled=False))
    assert counting.state_dict() == counting.scaler.state_dict() == {}  # type: ignore[attr-defined]
    with laststep.Checkpointer(tmp_path / "run", counting=counting) as run:
        counting.count = 3  # type: ignore[attr-defined]
        run.save(1)
    assert laststep.load(tmp_path / "run")["counting"] == {"count": 3}


def test_a_wrapper_that_changes_what_it_is_given_is_not_looked_through() -> None:
    class Adding(Delegate):
        def state_dict(self) -> dict[str, Any]:
            state = super().state_dict()
            state.update(vars(self).get("more", {}), kind="adding")
            return state

    scaler = torch.amp.GradScaler("cpu")
    adding = Adding("scaler", scaler)
    assert layers_of(adding)[-1] is adding
    assert vars(adding) == {"_name": "scaler", "scaler": scaler}


def test_an_optimizer_that_gives_more_than_its_groups_and_state_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Scaled(Wrapped):
        def state_dict(self) -> dict[str, Any]:
            return {"inner": super().state_dict(), "scale": 8.0}

    scaled = Scaled(training(torch.optim.SGD, 0, steps=1)[1])
    assert layers_of(scaled)[-1] is scaled
    assert warned(caplog, "Scaled", "SGD")


def test_a_wrapper_that_gets_a_state_of_its_own_is_an_error_at_the_next_save(
    tmp_path: Path,
) -> None:
    class Late(Delegate):
        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), **self.own} if self.own else super().state_dict()

        own: dict[str, Any] = {}  # noqa: RUF012

    class Own(Wrapped):
        state = None  # type: ignore[assignment]

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(optimizer)
            self.state: dict[Any, Any] = {}

    model, optimizer = training(torch.optim.AdamW, 0, steps=1)
    late, own = Late("scheduler", torch.optim.lr_scheduler.StepLR(optimizer, 2)), Own(optimizer)
    with laststep.Checkpointer(tmp_path / "run", model=model, late=late, own=own) as run:
        run.save(1)
        late.own = {"mine": 1}
        with raises(laststep.UsageError, where="item 'late'", expected="StepLR"):
            run.save(2)
        late.own = {}
        own.state[model.weight] = {"slow": torch.ones(2, 3)}
        with raises(laststep.UsageError, where="item 'own'", expected="AdamW"):
            run.save(2)
        own.state.clear()
        run.save(2)
        own.optimizer = torch.optim.AdamW(model.parameters())
        with raises(laststep.UsageError, where="item 'own'", expected="AdamW"):
            run.save(3)


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_what_accelerate_prepares_is_what_it_was(carry: Carry) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = training(torch.optim.AdamW, 0, steps=0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    prepared = accelerator.prepare(model, optimizer, schedule)
    assert layers_of(prepared[1])[-1] is optimizer
    assert layers_of(prepared[2])[-1] is schedule
    other, target = training(torch.optim.SGD, 1, steps=0)
    names = ("model", "optimizer")
    with pytest.raises(laststep.MismatchError, match="AdamW"):
        carry(dict(zip(names, prepared, strict=False)), {"model": other, "optimizer": target})
