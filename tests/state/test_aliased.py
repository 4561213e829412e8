"""A weight that is tied in one place and two parameters, under two names, in another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from expect import names, raises

if TYPE_CHECKING:
    from collections.abc import Callable

    Carry = Callable[..., laststep.Restored]

KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
}


class Apart(nn.Module):
    """As two stages of a pipeline have it: two parameters that begin alike and stay alike."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(words)))

    def add_gradients(self) -> None:
        total = self.embed.weight.grad + self.head.weight.grad
        self.embed.weight.grad, self.head.weight.grad = total, total.clone()


class Tied(Apart):
    """As one process has it."""

    def tie(self) -> None:
        self.head.weight = self.embed.weight

    def add_gradients(self) -> None:
        """They were added by autograd."""


class TiedFromTheHead(Tied):
    """Whose parameter is called after the head: that one comes first."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        modules = self._modules
        modules["embed"] = modules.pop("embed")


class Training:
    def __init__(self, model: Apart, steps: int = 0, kind: str = "adamw") -> None:
        self.model = model
        self.optimizer = KINDS[kind](list(model.parameters()))
        self.number = 0
        self.go_on(steps)

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            words = torch.randint(7, (8,), generator=torch.Generator().manual_seed(self.number))
            self.number += 1
            nn.functional.cross_entropy(self.model(words), words.roll(1)).backward()
            self.model.add_gradients()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def items(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def state(self) -> dict[str, torch.Tensor]:
        """All of it, under every name."""
        found = dict(self.model.state_dict())
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            for key, entry in self.optimizer.state[parameter].items():
                found[f"{name}:{key}"] = entry
        return {name: tensor.clone() for name, tensor in found.items()}


def assert_same(one: Training, other: Training) -> None:
    ours, theirs = one.state(), other.state()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def memories(training: Training) -> list[int]:
    tensors = [
        entry
        for entries in training.optimizer.state.values()
        for entry in entries.values()
        if isinstance(entry, torch.Tensor)
    ]
    return [tensor.data_ptr() for tensor in (*training.model.parameters(), *tensors)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    ("stored", "live"),
    [
        (Apart, Tied),
        (Tied, Apart),
        (Apart, Apart),
        (Tied, TiedFromTheHead),
        (Apart, TiedFromTheHead),
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped(
    stored: type[Apart], live: type[Apart], before: int, kind: str, carry: Carry
) -> None:
    source = Training(stored(0), 3, kind)
    target = Training(live(1), before, kind)
    carry(source.items(), target.items())
    assert_same(source, target)
    assert len(set(memories(target))) == len(memories(target))
    assert (target.model.head.weight is target.model.embed.weight) == isinstance(target.model, Tied)
    target.number = source.number
    source.go_on(3)
    target.go_on(3)
    assert_same(source, target)


@pytest.mark.parametrize(("stored", "live"), [(Apart, Tied), (Tied, Apart)])
def test_an_optimizer_without_a_step_rolls_one_with_steps_back(
    stored: type[Apart], live: type[Apart], carry: Carry
) -> None:
    source, target = Training(stored(0)), Training(live(1), 2)
    carry(source.items(), target.items())
    assert not any(target.optimizer.state.values())
    target.number = 0
    source.go_on(2)
    target.go_on(2)
    assert_same(source, target)


def test_one_of_two_parameters_may_have_been_stepped_already(carry: Carry) -> None:
    for had_none in ("embed", "head"):
        source, target = Training(Tied(0), 3), Training(Apart(1), 2)
        target.optimizer.state.pop(getattr(target.model, had_none).weight)
        carry(source.items(), target.items())
        assert_same(source, target)
        assert len(set(memories(target))) == len(memories(target))


def poke(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1] += 1


def test_two_that_differ_are_not_made_one(carry: Carry) -> None:
    source, target = Training(Apart(0), 3), Training(Tied(1), 2)
    poke(source.model.head.weight)
    with pytest.raises(laststep.MismatchError) as caught:
        carry(source.items(), target.items())
    (text,) = caught.value.problems.mismatched
    assert names(text, "model/head.weight", "embed.weight")
    assert "strict=False" in caught.value.remedy


def test_two_whose_moments_differ_are_not_made_one(carry: Carry) -> None:
    source, target = Training(Apart(0), 3), Training(Tied(1))
    poke(source.optimizer.state[source.model.head.weight]["exp_avg_sq"])
    with pytest.raises(laststep.MismatchError) as caught:
        carry(source.items(), target.items())
    (text,) = caught.value.problems.mismatched
    assert names(text, "optimizer/state/head.weight/exp_avg_sq", "state/embed.weight/exp_avg_sq")


def test_two_whose_plain_values_are_equal_and_not_the_same_are_not_made_one(carry: Carry) -> None:
    source, target = Training(Apart(0), 3), Training(Tied(1))
    states = [source.optimizer.state[getattr(source.model, n).weight] for n in ("embed", "head")]
    for state in states:
        state["note"] = float("nan")
    carry(source.items(), target.items())
    states[0]["note"], states[1]["note"] = 1, True
    with raises(laststep.MismatchError, "head.weight", "embed.weight"):
        carry(source.items(), target.items())


@pytest.mark.parametrize(("live", "taken"), [(Tied, "embed."), (TiedFromTheHead, "head.")])
def test_of_two_that_differ_the_first_is_taken_if_that_will_do(
    live: type[Apart], taken: str, carry: Carry
) -> None:
    source, target = Training(Apart(0), 3), Training(live(1), 1)
    poke(source.model.head.weight)
    poke(source.optimizer.state[source.model.head.weight]["exp_avg"])
    restored = carry(source.items(), target.items(), strict=False)
    assert len(restored.problems.mismatched) == len(restored.problems) == 2
    found, expected = target.state(), source.state()
    for name, tensor in found.items():
        own = name.replace("head.", taken).replace("embed.", taken)
        assert torch.equal(tensor, expected[own]), name


def test_one_that_was_stepped_and_one_that_was_not_are_told_before_anything_is_touched(
    carry: Carry,
) -> None:
    source, target = Training(Apart(0), 3), Training(Tied(1), 2)
    source.optimizer.state.pop(source.model.head.weight)
    before = target.state()
    with pytest.raises(laststep.MismatchError) as caught:
        carry(source.items(), target.items())
    (text,) = caught.value.problems.mismatched
    assert names(text, "head.weight", "embed.weight")
    assert all(torch.equal(before[name], tensor) for name, tensor in target.state().items())
    restored = carry(source.items(), target.items(), strict=False)
    assert len(restored.problems) == 1


def test_bytes_are_compared_so_nan_is_the_same_as_itself_and_zero_has_a_sign(carry: Carry) -> None:
    source, target = Apart(0), Tied(1)
    with torch.no_grad():
        source.embed.weight[0] = source.head.weight[0] = torch.tensor([torch.nan, -0.0, 0.0, 1.0])
    carry({"model": source}, {"model": target})
    assert target.embed.weight[0].isnan().tolist() == [True, False, False, False]
    with torch.no_grad():
        source.head.weight[0, 1] = 0.0
    with raises(laststep.MismatchError, "model/head.weight"):
        carry({"model": source}, {"model": target})


def test_a_part_is_taken_from_the_name_that_was_asked_for(carry: Carry) -> None:
    source, target = Training(Apart(0), 3), Training(Tied(1), 1)
    poke(source.model.head.weight)
    before = target.state()
    carry(source.items(), target.items(), only=["model/head.weight"])
    assert torch.equal(target.model.embed.weight, source.model.head.weight)
    assert torch.equal(target.model.body.weight, before["body.weight"])


def test_parts_of_an_optimizer_are_taken_through_either_name(carry: Carry) -> None:
    for stored, live in ((Apart, Tied), (Tied, Apart)):
        source, target = Training(stored(0), 3), Training(live(1), 2)
        before, expected = target.state(), source.state()
        carry(source.items(), target.items(), only=["optimizer/*exp_avg_sq"])
        for name, tensor in target.state().items():
            wanted = expected if name.endswith(":exp_avg_sq") else before
            assert torch.equal(tensor, wanted[name]), name


def test_a_part_of_an_optimizer_is_compared_with_nothing_that_was_not_asked_for(
    carry: Carry,
) -> None:
    source, target = Training(Apart(0), 3), Training(Tied(1), 2)
    poke(source.optimizer.state[source.model.head.weight]["exp_avg"])
    carry(source.items(), target.items(), only=["optimizer/state/embed.weight/*"])
    name = "embed.weight:exp_avg"
    assert torch.equal(target.state()[name], source.state()[name])


def test_the_optimizer_alone_learns_of_ties_from_the_model_that_stays(carry: Carry) -> None:
    for stored, live in ((Apart, Tied), (Tied, Apart)):
        source, target = Training(stored(0), 3), Training(live(1))
        weights = target.model.embed.weight.detach().clone()
        carry(source.items(), target.items(), only=["optimizer"])
        assert torch.equal(target.model.embed.weight, weights)
        found = target.state()
        for name, tensor in source.state().items():
            assert ":" not in name or torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("stored", "live"), [(Apart, Tied), (Tied, Apart)])
def test_a_group_of_a_model_and_its_optimizer(
    stored: type[Apart], live: type[Apart], carry: Carry
) -> None:
    source, target = Training(stored(0), 3), Training(live(1))
    carry({"all": {**source.items(), "n": 1}}, {"all": {**target.items(), "n": 0}})
    assert_same(source, target)


class Two:
    """Two models; one optimizer of both, or one for each."""

    def __init__(self, one: Apart, other: Apart, *, together: bool, steps: int = 0) -> None:
        self.trainings = [Training(one), Training(other)]
        if together:
            both = torch.optim.AdamW([*one.parameters(), *other.parameters()], lr=0.05)
            for training in self.trainings:
                training.optimizer = both
        for training in self.trainings:
            training.go_on(steps)
            if together:
                for parameter in training.model.parameters():
                    parameter.grad = None

    def items(self) -> dict[str, object]:
        one, other = self.trainings
        optimizers = {"opt": one.optimizer, "opt2": other.optimizer}
        if one.optimizer is other.optimizer:
            del optimizers["opt2"]
        return {"one": one.model, "other": other.model, **optimizers}


@pytest.mark.parametrize(("stored", "live"), [(Apart, Tied), (Tied, Apart)])
def test_one_optimizer_of_two_models_says_whose_names_it_means(
    stored: type[Apart], live: type[Apart], carry: Carry
) -> None:
    source = Two(stored(0), Apart(1), together=True, steps=2)
    target = Two(live(2), Apart(3), together=True)
    carry(source.items(), target.items())
    for ours, theirs in zip(source.trainings, target.trainings, strict=True):
        assert_same(ours, theirs)


def test_an_optimizer_that_does_not_say_which_model_needs_both_to_agree(carry: Carry) -> None:
    source = Two(Tied(0), Tied(1), together=False, steps=2)
    target = Two(Apart(2), Apart(3), together=False)
    carry(source.items(), target.items())
    for ours, theirs in zip(source.trainings, target.trainings, strict=True):
        assert_same(ours, theirs)
    source = Two(Tied(0), Apart(1), together=False, steps=2)
    with pytest.raises(laststep.MismatchError) as caught:
        carry(source.items(), target.items())
    (text,) = caught.value.problems.mismatched
    assert names(text, "opt", "head.weight")


def test_a_new_parameter_of_the_optimizer_is_still_missing(carry: Carry) -> None:
    source, target = Training(Apart(0), 2), Training(Apart(1))
    frozen = [p for n, p in source.model.named_parameters() if n != "head.weight"]
    source.optimizer = torch.optim.AdamW(frozen)
    with raises(laststep.MismatchError, "head.weight"):
        carry(source.items(), target.items())


def test_a_parameter_that_the_live_model_has_no_more_is_still_unexpected(carry: Carry) -> None:
    source, target = Training(Apart(0), 2), Training(Apart(1))
    target.model.head.weight.requires_grad_(False)
    left = [p for p in target.model.parameters() if p.requires_grad]
    target.optimizer = torch.optim.AdamW(left)
    with raises(laststep.MismatchError, problems="unexpected=('optimizer/state/head.weight',)"):
        carry(source.items(), target.items())


def test_tensors_that_merely_overlap_do_not_fit_what_was_stored_apart(carry: Carry) -> None:
    memory = torch.zeros(6)
    target = {"a": memory[:4], "b": memory[2:], "c": memory[:4]}
    source = {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)}
    with pytest.raises(laststep.MismatchError) as caught:
        carry({"state": source}, {"state": target})
    (text,) = caught.value.problems.mismatched
    assert names(text, "state/b", "a")
    assert not memory.any()


def test_windows_of_one_stored_memory_are_compared_where_they_lie(carry: Carry) -> None:
    memory = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 1.0])
    source = {"a": memory[:2], "over": memory[:5], "b": memory[4:6]}
    shared = torch.zeros(2)
    target = {"a": shared, "over": torch.zeros(5), "b": shared}
    carry({"state": source}, {"state": target})
    assert shared.tolist() == [0, 1]
    memory[5] = 7
    with raises(laststep.MismatchError, "state/b"):
        carry({"state": source}, {"state": target})
