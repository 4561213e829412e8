"""Optimizers: by the names of parameters, before and after the first step, of every kind."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import laststep
from cases import long
from expect import names, raises, warned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

KINDS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=1e-1, max_iter=3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2)),
}


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_exactly_where_it_was(kind: str, carry: Callable[..., object]) -> None:
    model = network(0)
    optimizer = KINDS[kind](list(model.parameters()))
    for number in range(3):
        step(model, optimizer, number)
    other = network(1)
    fresh = KINDS[kind](list(other.parameters()))
    carry({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": fresh})
    assert same(optimizer.state_dict(), fresh.state_dict())
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, fresh, number)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("kind", ["adamw", "momentum", "lbfgs", "adafactor", "fused"])
def test_an_optimizer_without_a_step_rolls_one_with_steps_back(
    kind: str, carry: Callable[..., object]
) -> None:
    model, other = network(0), network(1)
    optimizer, stepped = (
        KINDS[kind](list(model.parameters())),
        KINDS[kind](list(other.parameters())),
    )
    for number in range(2):
        step(other, stepped, number)
    carry({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": stepped})
    for number in range(2):
        step(model, optimizer, number)
        step(other, stepped, number)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def test_state_follows_names_when_the_order_of_parameters_changes(
    carry: Callable[..., object],
) -> None:
    model, other = network(0), network(0)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    # Shapes alone would not tell: both biases of the second order are as long as before.
    reordered = torch.optim.AdamW(list(reversed(list(other.parameters()))))
    carry({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": reordered})
    for (_, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert same(optimizer.state[a], reordered.state[b])
    assert torch.equal(reordered.param_groups[0]["params"][0], other[1].bias)


def test_fp32_moments_of_bf16_parameters_stay_fp32(carry: Callable[..., object]) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 4).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(parameter.shape),
            "exp_avg_sq": torch.rand(parameter.shape),
        }
    other, fresh = make()
    carry({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": fresh})
    assert fresh.state[other.weight]["exp_avg"].dtype == torch.float32
    assert torch.equal(
        fresh.state[other.weight]["exp_avg"], optimizer.state[model.weight]["exp_avg"]
    )


def test_options_of_several_groups_come_back(carry: Callable[..., object]) -> None:
    def make(seed: int, rates: tuple[float, float]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = network(seed)
        groups = [
            {"params": model[0].parameters(), "lr": rates[0]},
            {"params": model[1].parameters(), "lr": rates[1], "weight_decay": rates[1]},
        ]
        return model, torch.optim.AdamW(groups)

    model, optimizer = make(0, (0.5, 0.25))
    step(model, optimizer, 0)
    optimizer.param_groups[1]["betas"] = (0.1, 0.2)
    other, fresh = make(1, (9.0, 9.0))
    carry({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": fresh})
    assert [g["lr"] for g in fresh.param_groups] == [0.5, 0.25]
    assert fresh.param_groups[1]["weight_decay"] == 0.25
    assert fresh.param_groups[1]["betas"] == (0.1, 0.2)


def test_a_tensor_learning_rate_stays_the_very_same_tensor(carry: Callable[..., object]) -> None:
    model, other = network(0), network(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.125))
    rate = torch.tensor(7.0)
    fresh = torch.optim.AdamW(other.parameters(), lr=rate)
    carry({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": fresh})
    assert fresh.param_groups[0]["lr"] is rate
    assert rate == 0.125
    plain = torch.optim.AdamW(model.parameters(), lr=0.0625)
    carry({"model": model, "optimizer": plain}, {"model": other, "optimizer": fresh})
    assert fresh.param_groups[0]["lr"] is rate
    assert rate == 0.0625


def test_how_a_step_is_computed_stays_the_choice_of_the_live_optimizer(
    carry: Callable[..., object],
) -> None:
    model, other = network(0), network(1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step(model, optimizer, 0)
    fresh = torch.optim.AdamW(other.parameters(), foreach=True, maximize=True)
    carry({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": fresh})
    group = fresh.param_groups[0]
    assert (group["fused"], group["foreach"], group["maximize"]) == (None, True, False)


def test_the_counters_of_capturable_optimizers_come_back(carry: Callable[..., object]) -> None:
    model, other = network(0), network(1)
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    for parameter in model.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.ones_like(parameter),
            "exp_avg_sq": torch.ones_like(parameter),
        }
    fresh = torch.optim.Adam(other.parameters(), capturable=True)
    carry({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": fresh})
    assert fresh.state[other[0].weight]["step"] == 5


def test_names_given_to_the_optimizer_itself_are_used(carry: Callable[..., object]) -> None:
    model, other = network(0), network(1)
    optimizer = torch.optim.AdamW(model.named_parameters())
    step(model, optimizer, 0)
    fresh = torch.optim.AdamW(list(reversed(list(other.named_parameters()))))
    carry({"optimizer": optimizer}, {"optimizer": fresh})
    assert same(optimizer.state[model[0].weight], fresh.state[other[0].weight])


def test_parameters_of_no_module_go_by_their_place(carry: Callable[..., object]) -> None:
    def make() -> torch.optim.Optimizer:
        return torch.optim.SGD(
            [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))], lr=1, momentum=0.5
        )

    optimizer, fresh = make(), make()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.arange(len(parameter)).float()
    optimizer.step()
    carry({"optimizer": optimizer}, {"optimizer": fresh})
    assert same(optimizer.state_dict(), fresh.state_dict())


def test_names_do_not_depend_on_which_other_modules_are_saved(carry: Callable[..., object]) -> None:
    model, other = network(0), network(1)
    optimizer, fresh = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    step(model, optimizer, 0)
    carry(
        {"model": model, "optimizer": optimizer},
        {"model": other, "optimizer": fresh, "average": network(2)},
        strict=False,
    )
    assert same(optimizer.state[model[0].weight], fresh.state[other[0].weight])


def test_one_optimizer_of_two_modules_tells_them_apart(carry: Callable[..., object]) -> None:
    def make(seed: int) -> dict[str, object]:
        left, right = network(seed), network(seed + 1)
        optimizer = torch.optim.AdamW([*left.parameters(), *right.parameters()])
        (left(torch.ones(1, 4)) * right(torch.ones(1, 4))).sum().backward()
        optimizer.step()
        return {"left": left, "right": right, "optimizer": optimizer}

    source, target = make(0), make(10)
    carry(source, target)
    for side in ("left", "right"):
        for a, b in zip(source[side].parameters(), target[side].parameters(), strict=True):
            assert same(source["optimizer"].state[a], target["optimizer"].state[b])


def test_other_parameters_or_groups_than_the_stored_are_listed(
    carry: Callable[..., object],
) -> None:
    model, other = network(0), network(1)
    source = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    groups = [{"params": other[0].parameters()}, {"params": other[1].parameters()}]
    with raises(laststep.MismatchError, "2", "1", problems="optimizer"):
        carry(source, {"model": other, "optimizer": torch.optim.AdamW(groups)})
    fewer = torch.optim.AdamW(other[0].parameters())
    with raises(
        laststep.MismatchError,
        problems="unexpected=('optimizer/state/1.bias', 'optimizer/state/1.weight')",
    ):
        carry(source, {"model": other, "optimizer": fewer})


def test_stored_state_without_a_parameter_is_told_of_a_per_rank_optimizer_too(
    carry: Callable[..., object],
) -> None:
    model, other = network(0), network(1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    fewer = torch.optim.AdamW(other[0].parameters())
    with raises(
        laststep.MismatchError,
        problems="unexpected=('optimizer/state/1.bias', 'optimizer/state/1.weight')",
    ):
        carry(
            {"model": model, "optimizer": laststep.PerRank(optimizer)},
            {"model": other, "optimizer": laststep.PerRank(fewer)},
        )


def test_a_part_of_the_moments_does_not_make_half_an_optimizer(
    carry: Callable[..., object],
) -> None:
    model, other = network(0), network(1)
    optimizer, fresh = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    step(model, optimizer, 0)
    source = {"model": model, "optimizer": optimizer}
    target = {"model": other, "optimizer": fresh}
    with pytest.raises(laststep.MismatchError, match="exp_avg"):
        carry(source, target, only=["optimizer/*exp_avg"])
    assert not fresh.state
    step(other, fresh, 5)
    carry(source, target, only=["optimizer/*exp_avg"])
    assert torch.equal(
        fresh.state[other[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"]
    )
    assert not torch.equal(
        fresh.state[other[0].weight]["exp_avg_sq"], optimizer.state[model[0].weight]["exp_avg_sq"]
    )


def test_the_state_of_another_kind_of_optimizer_does_not_fit(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    adam = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    adam.step()
    with laststep.Checkpointer(
        tmp_path / "run", model=model, optimizer=adam, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with laststep.Checkpointer(
        tmp_path / "run", model=model, optimizer=sgd, options=laststep.Options(flush="thread")
    ) as checkpointer:
        with raises(laststep.MismatchError, "SGD", "AdamW"):
            checkpointer.restore()
        assert sgd.param_groups[0]["lr"] == 0.1


def stepped(*sizes: int, fused: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    layer = nn.Linear(*sizes)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=fused)
    layer(torch.randn(2, sizes[0])).sum().backward()
    optimizer.step()
    return layer, optimizer


@pytest.mark.parametrize(
    ("with_model", "only"),
    [
        (True, None),
        (False, ["opt"]),
        (True, ["opt/*exp_avg"]),
        *long((False, None), (True, ["opt"]), (False, ["opt/*exp_avg"])),
    ],
)
def test_moments_of_a_parameter_of_another_shape_are_refused_before_the_first_step(
    tmp_path: Path, with_model: bool, only: list[str] | None
) -> None:
    """A fused step would read and write past the end of them."""
    layer, optimizer = stepped(8, 16)
    items = {"model": layer} if with_model else {}
    with laststep.Checkpointer(tmp_path, opt=optimizer, **items) as ckpt:
        ckpt.save(0)
    other = nn.Linear(16, 8)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
    items = {"model": other} if with_model else {}
    with laststep.Checkpointer(tmp_path, opt=fresh, **items) as ckpt:
        if only != ["opt/*exp_avg"]:
            with raises(laststep.MismatchError, "float32[16, 8]", "float32[8, 16"):
                ckpt.restore(only=only)
            assert not fresh.state
            with raises(laststep.MismatchError, where="step-00000000.1-1") as raised:
                ckpt.restore(only=only, strict=False)
            problems = raised.value.problems
            assert sum(text.startswith("opt/") for text in problems.mismatched) == 2
        else:
            with pytest.raises(laststep.LaststepError):
                ckpt.restore(only=only)
    assert not any(fresh.state.values())
    other(torch.randn(2, 16)).sum().backward()
    fresh.step()  # with state of its own


def test_moments_of_a_parameter_of_another_dtype_are_refused(tmp_path: Path) -> None:
    _, optimizer = stepped(4, 4)
    with laststep.Checkpointer(tmp_path, opt=optimizer) as ckpt:
        ckpt.save(0)
    half = nn.Linear(4, 4).bfloat16()
    fresh = torch.optim.AdamW(half.parameters())
    with (
        laststep.Checkpointer(tmp_path, opt=fresh) as ckpt,
        raises(laststep.MismatchError, "float32[4, 4]", "bfloat16"),
    ):
        ckpt.restore()


def test_options_of_another_number_of_groups_are_left_alone(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    with laststep.Checkpointer(
        tmp_path, model=layer, opt=torch.optim.AdamW(layer.parameters(), weight_decay=0.01)
    ) as ckpt:
        ckpt.save(0)
    groups = [{"params": [layer.weight], "weight_decay": 0.1}, {"params": [layer.bias]}]
    two = torch.optim.AdamW(groups, weight_decay=0.0)
    with laststep.Checkpointer(tmp_path, model=layer, opt=two) as ckpt:
        problems = ckpt.restore(strict=False).problems
    first, second = problems.mismatched
    assert names(first, "opt", "2", "1")
    assert names(second, "opt", "options")
    assert [group["weight_decay"] for group in two.param_groups] == [0.1, 0.0]


def test_an_imported_positional_state_says_what_it_is(tmp_path: Path) -> None:
    _, optimizer = stepped(2, 2)
    with laststep.Checkpointer(tmp_path, opt=optimizer.state_dict()) as ckpt:
        ckpt.save(0)
    with (
        laststep.Checkpointer(tmp_path, opt=optimizer) as ckpt,
        raises(laststep.MismatchError, "opt", "load_state_dict()"),
    ):
        ckpt.restore()


def test_a_state_of_dcps_by_names_says_how_it_is_loaded(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2)).sum().backward()
    optimizer.step()
    _, by_name = get_state_dict(layer, optimizer)
    with laststep.Checkpointer(tmp_path, opt=by_name) as ckpt:
        ckpt.save(0)
    with (
        laststep.Checkpointer(tmp_path, opt=optimizer) as ckpt,
        raises(laststep.MismatchError, "opt", "Reader", "set_state_dict"),
    ):
        ckpt.restore()


@pytest.mark.parametrize("nested", [False, True])
def test_parameters_in_a_dict_have_its_names_whatever_their_order(
    carry: Callable[..., object], *, nested: bool
) -> None:
    def weights(seed: int) -> tuple[dict[str, torch.nn.Parameter], object]:
        torch.manual_seed(seed)
        each = {name: torch.nn.Parameter(torch.randn(4)) for name in ("a", "b", "c")}
        return each, {"layer": each} if nested else each

    def stepped(
        each: dict[str, torch.nn.Parameter], order: str, steps: int
    ) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([each[name] for name in order])
        for _ in range(steps):
            for number, weight in enumerate(each.values()):
                weight.grad = torch.full((4,), float(number + 1))
            optimizer.step()
        return optimizer

    ours, item = weights(0)
    optimizer = stepped(ours, "abc", 2)
    theirs, other_item = weights(1)
    other = stepped(theirs, "cab", 0)
    restored = carry(
        {"lora": item, "optimizer": optimizer}, {"lora": other_item, "optimizer": other}
    )
    assert not restored.problems
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name])
        assert same(optimizer.state[weight], other.state[theirs[name]])


def test_state_of_weights_in_a_dict_goes_into_the_module_that_has_them(
    carry: Callable[..., object],
) -> None:
    model, other = network(0), network(1)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 0)
    live = torch.optim.AdamW(list(other.parameters())[::-1])
    carry(
        {"model": dict(model.named_parameters()), "optimizer": optimizer},
        {"model": other, "optimizer": live},
    )
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert same(optimizer.state[ours], live.state[theirs])


def test_state_that_goes_by_place_is_said_once_by_each_checkpointer(
    carry: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    weights = [torch.nn.Parameter(torch.randn(7, 3)) for _ in range(2)]
    carry({"optimizer": torch.optim.SGD(weights)}, {"optimizer": torch.optim.SGD(weights)})
    assert len(warned(caplog, "2 of 2")) == 2  # one for each  # one for each


def momenta(optimizer: torch.optim.Optimizer) -> list[float]:
    """The first number of each momentum."""
    return [entry["momentum_buffer"].flatten()[0].item() for entry in optimizer.state.values()]


def with_momentum(parameters: Iterable[nn.Parameter], gradient: float = 0) -> torch.optim.Optimizer:
    parameters = list(parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, gradient)
    if gradient:
        optimizer.step()
    return optimizer


class Tag:
    """Something with a state of its own, so that the dict that holds it is a group."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize("more", [{}, {"tag": Tag()}], ids=["plain", "group"])
@pytest.mark.parametrize("how", [{}, {"only": ["opt"]}, {"strict": False}], ids=str)
def test_state_does_not_go_to_another_key_of_a_dict_that_ends_in_the_same(
    carry: Callable[..., object], more: dict[str, object], how: dict[str, object]
) -> None:
    def weights() -> dict[str, object]:
        return {f"l{n}.weight": nn.Parameter(torch.full((3,), float(n))) for n in (1, 2)} | more

    source, target = weights(), weights()
    live = with_momentum([target["l2.weight"]])
    strict = how.get("strict", True)
    with raises(laststep.MismatchError, "l2.weight") if strict else contextlib.nullcontext():
        carry(
            {"x": source, "opt": with_momentum([source["l1.weight"]], 5.0)},
            {"x": target, "opt": live},
            **how,
        )
    assert not live.state


def test_names_in_a_dict_are_the_same_when_an_object_comes_to_it(
    carry: Callable[..., object],
) -> None:
    source, target = ({f"0.{n}": nn.Parameter(torch.ones(2)) for n in "ab"} for _ in range(2))
    live = with_momentum(reversed(target.values()))
    carry(
        {"x": source, "opt": with_momentum(source.values(), 5.0)},
        {"x": {**target, "tag": Tag()}, "opt": live},
        only=["opt"],
    )
    assert momenta(live) == [5.0, 5.0]


@pytest.mark.parametrize("grouped", [False, True])
def test_state_does_not_go_to_the_parameters_of_another_item(
    carry: Callable[..., laststep.Restored], *, grouped: bool
) -> None:
    def items(which: str, gradient: float = 0) -> dict[str, object]:
        made = {"gen": nn.Linear(3, 3), "critic": nn.Linear(3, 3)}
        optimizer = with_momentum(made[which].parameters(), gradient)
        return {"x": {**made, "opt": optimizer}} if grouped else {**made, "opt": optimizer}

    def optimizer(of: dict[str, object]) -> torch.optim.Optimizer:
        return of["x"]["opt"] if grouped else of["opt"]

    target = items("critic")
    x = "x." if grouped else ""
    with raises(laststep.MismatchError, f"{x}critic", f"{x}gen"):
        carry(items("gen", 5.0), target)
    problems = carry(items("gen", 5.0), target, strict=False).problems
    assert names(problems.mismatched[0], f"{x}critic", f"{x}gen")
    assert not optimizer(target).state
    carry(items("critic", 5.0), target)
    assert momenta(optimizer(target)) == [5.0, 5.0]


def test_a_key_of_another_type_that_comes_to_a_group_changes_no_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 1)
    group: dict[object, object] = {"model": model}
    with laststep.Checkpointer(
        tmp_path,
        x=group,
        opt=with_momentum(model.parameters(), 5.0),
        options=laststep.Options(flush="thread"),
    ) as ckpt:
        group[3] = "three"
        ckpt.save(0).wait()
    assert set(laststep.load(tmp_path)["opt"]["state"]) == {"weight", "bias"}
    assert not warned(caplog)


def test_options_go_to_the_groups_that_have_the_same_parameters(
    carry: Callable[..., laststep.Restored],
) -> None:
    def items(order: Iterable[str], more: Iterable[str] = ()) -> dict[str, object]:
        model = nn.Linear(3, 3)
        model.register_parameter("scale", nn.Parameter(torch.ones(1)))
        decay = {"weight": 0.1, "bias": 0.2, "scale": 0.3}
        parts = dict(model.named_parameters())
        groups = [{"params": [parts[name]], "weight_decay": decay[name]} for name in order]
        groups += [{"params": [parts[name]], "weight_decay": 0.7} for name in more]
        return {"model": model, "opt": torch.optim.SGD(groups, lr=0.1, momentum=0.9)}

    def decays(items: dict[str, object]) -> list[float]:
        return [group["weight_decay"] for group in items["opt"].param_groups]

    target = items(["bias", "weight", "scale"])
    for group in target["opt"].param_groups:
        group["weight_decay"] = 0.0
    source = items(["weight", "bias", "scale"])
    with raises(laststep.MismatchError, problems="opt"):
        carry(source, target)
    carry(source, target, strict=False)
    assert decays(target) == [0.2, 0.1, 0.3]
    other = items(["scale", "bias"], more=["weight"])
    restored = carry(items(["weight", "bias"]), other, strict=False)
    assert decays(other) == [0.3, 0.2, 0.1]
    assert any(names(text, "opt", "options") for text in restored.problems.mismatched)


def test_a_restore_logs_which_settings_it_replaced(
    carry: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    def make(lr: float) -> dict[str, object]:
        model = nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=lr)}

    with caplog.at_level("INFO", "laststep"):
        carry(make(3e-4), make(1e-2))
        assert "AdamW: restored lr 0.0003 instead of 0.01" in caplog.messages
        caplog.clear()
        carry(make(3e-4), make(3e-4))
        assert not [text for text in caplog.messages if "AdamW" in text]
