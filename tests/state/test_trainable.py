"""Of a module only what is trained is saved, and the rest is left as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from expect import raises
from laststep.events import Bus
from laststep.ranks.group import Rank
from laststep.saving.context import RunContext, memory_for
from laststep.settings import Settings, as_keywords
from laststep.state.items import providers_for
from laststep.storage.directory import DirectoryStore
from laststep.tiers.tier import arranged

if TYPE_CHECKING:
    from pathlib import Path


class Adapted(nn.Module):
    """A frozen base, with a norm that counts, and a small adapter."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).requires_grad_(False)
        self.frozen = nn.Module()
        self.frozen.register_buffer("table", torch.rand(1000))
        self.adapter = nn.Linear(64, 4, bias=False)
        self.adapter.register_buffer("scale", torch.rand(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.base(x)) * self.adapter.scale


def trained(seed: int) -> tuple[Adapted, torch.optim.Optimizer]:
    model = Adapted(seed)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    model(torch.rand(8, 64)).sum().backward()
    optimizer.step()
    return model, optimizer


def how(model: Adapted, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {
        "model": laststep.trainable(model),
        "optimizer": optimizer,
        "flush": "thread",
        "progress": False,
        "host_memory_bytes": 64 << 20,
    }


def test_what_is_trained_is_stored_under_its_plain_names_and_nothing_else(run_folder: Path) -> None:
    model, optimizer = trained(1)
    wrapped = nn.DataParallel(model)
    with laststep.Checkpointer(run_folder, **as_keywords(how(wrapped, optimizer))) as ckpt:
        ckpt.save(1)
    stored = laststep.open(run_folder).latest().tensors()
    assert [name for name in stored if name.startswith("model/")] == [
        "model/base.1.running_mean",
        "model/base.1.running_var",
        "model/base.1.num_batches_tracked",
        "model/adapter.weight",
        "model/adapter.scale",
    ]
    assert "optimizer/state/adapter.weight/exp_avg" in stored


def test_a_restore_brings_back_what_was_trained_and_leaves_the_base_alone(run_folder: Path) -> None:
    model, optimizer = trained(1)
    with laststep.Checkpointer(run_folder, **as_keywords(how(model, optimizer))) as ckpt:
        ckpt.save(1)
    other, its = trained(2)
    base = other.base[0].weight.clone()
    with laststep.Checkpointer(run_folder, **as_keywords(how(other, its))) as ckpt:
        ckpt.restore()
    assert torch.equal(other.adapter.weight, model.adapter.weight)
    assert torch.equal(other.base[1].running_var, model.base[1].running_var)
    assert torch.equal(other.base[0].weight, base)


def test_what_is_thawed_later_is_saved_from_then_on(run_folder: Path) -> None:
    model, optimizer = trained(1)
    with laststep.Checkpointer(run_folder, **as_keywords(how(model, optimizer))) as ckpt:
        ckpt.save(1)
        model.base[0].requires_grad_(True)
        ckpt.save(2)
    assert "model/base.0.weight" in laststep.open(run_folder)[2].tensors()
    other, its = trained(2)
    with laststep.Checkpointer(run_folder, **as_keywords(how(other, its))) as ckpt:
        assert ckpt.restore().step == 2
        assert torch.equal(other.base[0].weight, model.base[0].weight)
        with pytest.raises(laststep.MismatchError, match=r"base\.0\.weight"):
            ckpt.restore(1)  # what it was then, nobody knows
    with laststep.Checkpointer(run_folder, **as_keywords(how(*trained(2)))) as ckpt:
        assert ckpt.restore(1).step == 1


def test_what_was_trained_and_is_frozen_since_is_saved_and_comes_back(run_folder: Path) -> None:
    """As with a head that is trained first, or peft's adapters, of which one is active."""
    model, optimizer = trained(1)
    model.second = nn.Linear(64, 4)
    with laststep.Checkpointer(run_folder, **as_keywords(how(model, optimizer))) as ckpt:
        ckpt.save(1)
        nn.init.constant_(model.adapter.weight, 7.0)
        model.adapter.requires_grad_(False)
        ckpt.save(2)
    other, its = trained(2)
    other.second = nn.Linear(64, 4)
    other.adapter.requires_grad_(False)
    with laststep.Checkpointer(run_folder, **as_keywords(how(other, its))) as ckpt:
        assert ckpt.restore().step == 2
        ckpt.save(3)
    assert torch.equal(other.adapter.weight, model.adapter.weight)
    assert "model/adapter.weight" in laststep.open(run_folder)[3].tensors()


def test_a_module_of_which_nothing_is_trained_is_told(run_folder: Path) -> None:
    model, optimizer = trained(1)
    model.requires_grad_(False)
    with (
        laststep.Checkpointer(run_folder, **as_keywords(how(model, optimizer))) as ckpt,
        raises(laststep.UsageError, where="item 'model'", found=True),
    ):
        ckpt.save(1)
    with raises(laststep.UsageError, found="dict"):
        laststep.trainable({"w": torch.zeros(2)})  # type: ignore[arg-type]


def test_no_memory_is_made_ready_for_what_is_frozen(tmp_path: Path) -> None:
    model, frozen_bytes = Adapted(1), 64 * 65 * 4
    late = laststep.Deferred(lambda: model, laststep.trainable)
    items = ({"model": model}, {"model": laststep.trainable(model)}, {"model": late})
    providers = [providers_for(one) for one in items]
    providers[2]["model"].describe()  # which makes it
    contexts = [
        RunContext(
            store=DirectoryStore(tmp_path),
            tiers=arranged(str(tmp_path), (), None),
            providers=one,
            settings=Settings(),
            rank=Rank(0, 1),
            bus=Bus(),
        )
        for one in providers
    ]
    whole, part, made_late = (memory_for(one)[1] for one in contexts)
    assert whole - part >= frozen_bytes
    assert made_late == part
