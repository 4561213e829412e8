"""Modules: plain, wrapped, hooked, with extra state, and whose parameters are replaced."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import laststep
from expect import raises
from laststep.settings import as_keywords
from laststep.state.modules import ModuleProvider, parameter_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def equal(a: nn.Module, b: nn.Module) -> bool:
    left, right = plain_state(a), plain_state(b)
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def plain_state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name.replace("_orig_mod.", "").replace("module.", ""): tensor
        for name, tensor in module.state_dict().items()
    }


class DistributedDataParallel(nn.Module):
    """Known by its name alone, as the real one is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class OptimizedModule(DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self._orig_mod = module


class WithExtra(nn.Module):
    def __init__(self, extra: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        self.extra = state


class Fp8Meta(nn.Module):
    """Extra state inside a tree, and tensors in it that grow."""

    def __init__(self, extra: object) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(2, 2), WithExtra(extra)])


def test_a_module_comes_back_with_its_buffers_and_its_tensors_stay_the_same(
    carry: Callable[..., object],
) -> None:
    source, target = network(0), network(1)
    source(torch.randn(8, 5))  # moves the running statistics
    before = [(p, p.data_ptr()) for p in target.parameters()]
    assert not equal(source, target)
    carry({"model": source}, {"model": target})
    assert equal(source, target)
    assert target[1].num_batches_tracked == 1
    after = [(p, p.data_ptr()) for p in target.parameters()]
    assert all(a[0] is b[0] and a[1] == b[1] for a, b in zip(before, after, strict=True))
    assert all(p.requires_grad and p.is_leaf for p in target.parameters())


def test_buffers_that_are_not_persistent_stay_out(carry: Callable[..., object]) -> None:
    def make(value: float) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("kept", torch.full((2,), value))
        module.register_buffer("scratch", torch.full((2,), value), persistent=False)
        module.register_buffer("none", None)
        return module

    source, target = make(1.0), make(2.0)
    carry({"model": source}, {"model": target})
    assert target.kept.tolist() == [1, 1]
    assert target.scratch.tolist() == [2, 2]


@pytest.mark.parametrize("wrap", [DistributedDataParallel, OptimizedModule, nn.DataParallel])
def test_a_wrapped_module_loads_into_a_plain_one_and_back(
    wrap: type[nn.Module], carry: Callable[..., object]
) -> None:
    source, target = network(0), network(1)
    carry({"model": wrap(source)}, {"model": target})
    assert equal(source, target)
    third = network(2)
    carry({"model": target}, {"model": wrap(third)})
    assert equal(source, third)


def test_wrappers_within_each_other_are_all_looked_through(carry: Callable[..., object]) -> None:
    source, target = network(0), network(1)
    carry({"model": OptimizedModule(DistributedDataParallel(source))}, {"model": target})
    assert equal(source, target)


compiling = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")


@compiling
def test_a_compiled_module_loads_into_a_plain_one_and_back(carry: Callable[..., object]) -> None:
    source, target = network(0), network(1)
    carry({"model": torch.compile(source)}, {"model": target})
    assert equal(source, target)
    third = network(2)
    carry({"model": target}, {"model": torch.compile(third)})
    assert equal(source, third)


@compiling
def test_a_submodule_compiled_inside_loads_into_a_plain_one(carry: Callable[..., object]) -> None:
    source, target = network(0), network(1)
    source[2] = torch.compile(source[2])
    carry({"model": source}, {"model": target})
    assert equal(source, target)
    back = network(2)
    back[0] = torch.compile(back[0])
    carry({"model": target}, {"model": back})
    assert equal(source, back)


def test_a_submodule_that_is_called_module_is_no_wrapper() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    described = ModuleProvider(Holder()).describe()
    assert set(described.value) == {"module.weight", "module.bias"}


# TorchScript is deprecated, by a DeprecationWarning and since torch 2.15 by a FutureWarning.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit:FutureWarning")
def test_a_module_compiled_by_torchscript_has_the_names_of_the_plain_one() -> None:
    plain = network()
    scripted = torch.jit.script(plain)
    described = ModuleProvider(scripted).describe()
    assert list(described.value) == list(ModuleProvider(plain).describe().value)
    assert sorted(parameter_names(scripted).values()) == sorted(parameter_names(plain).values())


@pytest.fixture
def gloo() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_real_ddp_module_loads_into_a_plain_one_and_back(
    gloo: None, carry: Callable[..., object]
) -> None:
    source, target = network(0), network(1)
    wrapped = nn.parallel.DistributedDataParallel(source)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    wrapped(torch.randn(8, 5)).sum().backward()
    optimizer.step()
    other = torch.optim.AdamW(target.parameters())
    carry({"model": wrapped, "optimizer": optimizer}, {"model": target, "optimizer": other})
    assert equal(source, target)
    assert torch.equal(
        other.state[target[0].weight]["exp_avg"], optimizer.state[source[0].weight]["exp_avg"]
    )
    third = nn.parallel.DistributedDataParallel(network(2))
    carry({"model": target}, {"model": third})
    assert equal(source, third)


@compiling
def test_names_are_those_of_the_plain_state_dict() -> None:
    plain = network()
    compiled = copy.deepcopy(plain)
    compiled[0] = torch.compile(compiled[0])
    wrapped = DistributedDataParallel(compiled)
    assert list(ModuleProvider(wrapped).describe().value) == list(plain.state_dict())
    assert set(parameter_names(wrapped).values()) == {n for n, _ in plain.named_parameters()}


def test_tied_weights_are_stored_once_and_restored_through_either_name(
    tmp_path: Path, carry: Callable[..., object]
) -> None:
    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.embed = nn.Embedding(64, 16)
            self.head = nn.Linear(16, 64, bias=False)
            self.head.weight = self.embed.weight

    source, target = Tied(0), Tied(1)
    carry({"model": source}, {"model": target})
    assert torch.equal(source.head.weight, target.head.weight)
    assert target.head.weight is target.embed.weight
    laststep.save(source, tmp_path / "one")
    header = (tmp_path / "one" / "state.safetensors").read_bytes()
    assert header.count(b'"head.weight"') + header.count(b'"embed.weight"') == 1


def test_tied_in_the_checkpoint_and_apart_now_both_get_the_value(
    carry: Callable[..., object],
) -> None:
    source = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    source[1].weight = source[0].weight
    target = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    carry({"model": source}, {"model": target})
    assert torch.equal(target[0].weight, source[0].weight)
    assert torch.equal(target[1].weight, source[0].weight)
    assert target[0].weight is not target[1].weight


def test_a_module_used_twice_is_stored_once(carry: Callable[..., object]) -> None:
    def make() -> nn.Module:
        shared = nn.Linear(2, 2)
        return nn.ModuleDict({"a": shared, "b": shared})

    source, target = make(), make()
    carry({"model": source}, {"model": target})
    assert equal(source, target)


@pytest.mark.parametrize(
    "extra",
    [{"amax": [1.5, 2.5], "kind": "fp8"}, torch.arange(6), {"scale": torch.ones(2, 2)}, 7, "text"],
)
def test_extra_state_comes_back_whatever_shape_the_live_one_has(
    extra: object, carry: Callable[..., object]
) -> None:
    source, target = Fp8Meta(extra), Fp8Meta({})
    carry({"model": source}, {"model": target})
    found = target.inner[1].extra
    if isinstance(extra, torch.Tensor):
        assert torch.equal(found, extra)
    elif isinstance(extra, dict) and "scale" in extra:
        assert torch.equal(found["scale"], extra["scale"])
    else:
        assert found == extra
    assert torch.equal(target.inner[0].weight, source.inner[0].weight)


def test_state_dict_hooks_are_obeyed_on_both_ways(carry: Callable[..., object]) -> None:
    def make(seed: int) -> nn.Module:
        module = network(seed)

        def double(module: nn.Module, state: dict, prefix: str, meta: object) -> None:
            state["2.weight"] = state["2.weight"] * 2
            state["added"] = torch.tensor(42)

        def halve(module: nn.Module, state: dict, *rest: object) -> None:
            state["2.weight"] = state["2.weight"] / 2
            state.pop("added", None)

        module.register_state_dict_post_hook(double)
        module.register_load_state_dict_pre_hook(halve)
        return module

    source, target = make(0), make(1)
    carry({"model": source}, {"model": target})
    assert torch.equal(source[2].weight, target[2].weight)
    assert torch.equal(source[0].weight, target[0].weight)


def test_without_hooks_tensors_are_taken_and_put_back_as_they_lie(tmp_path: Path) -> None:
    def hooked(seed: int) -> nn.Sequential:
        module = network(seed)
        module.register_state_dict_post_hook(refuse)
        module.register_load_state_dict_pre_hook(refuse)
        return module

    def refuse(*_: object) -> None:
        raise AssertionError("a hook was called")

    module, other = hooked(0), hooked(1)
    with laststep.Checkpointer(tmp_path / "run", m=ModuleProvider(module, hooks=False)) as ckpt:
        ckpt.save(0)
    with laststep.Checkpointer(tmp_path / "run", m=ModuleProvider(other, hooks=False)) as ckpt:
        ckpt.restore()
    pairs = zip(module.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(here, there) for here, there in pairs)


def test_hooks_for_the_end_of_loading_run_once_with_what_was_restored(
    carry: Callable[..., object],
) -> None:
    seen: list[tuple[str, float, int]] = []

    class Cached(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            nn.init.constant_(self.inner.weight, value)
            for name, module in (("outer", self), ("inner", self.inner)):
                module.register_load_state_dict_post_hook(functools.partial(self.note, name))

        def note(self, name: str, module: nn.Module, keys: Any) -> None:
            seen.append((name, self.inner.weight[0, 0].item(), len(keys.missing_keys)))
            keys.missing_keys.clear()  # as some do

    carry({"model": Cached(3.0)}, {"model": Cached(1.0)})
    assert seen == [("inner", 3.0, 0), ("outer", 3.0, 0)]


def test_a_hook_for_the_end_of_loading_that_raises_is_a_mismatch(
    carry: Callable[..., object],
) -> None:
    target = network(1)

    def refuse(module: nn.Module, keys: object) -> None:
        raise ValueError("not with me")

    target.register_load_state_dict_post_hook(refuse)
    with pytest.raises(laststep.MismatchError, match="not with me"):
        carry({"model": network(0)}, {"model": target})


def test_a_parameter_replaced_between_saves_is_followed_in_module_and_optimizer(
    tmp_path: Path,
) -> None:
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings = {"flush": "thread", "host_memory_bytes": 64 << 20}
    with laststep.Checkpointer(
        tmp_path / "run", model=model, optimizer=optimizer, **as_keywords(settings)
    ) as checkpointer:
        checkpointer.save(0)
        model[2].weight = nn.Parameter(torch.full((3, 7), 5.0))
        optimizer.param_groups[0]["params"] = list(model.parameters())
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        checkpointer.save(1)
    other = network(1)
    restored = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with laststep.Checkpointer(
        tmp_path / "run", model=other, optimizer=restored, **as_keywords(settings)
    ) as checkpointer:
        assert checkpointer.restore().step == 1
    assert torch.equal(other[2].weight, model[2].weight)
    assert torch.equal(
        restored.state[other[2].weight]["momentum_buffer"],
        optimizer.state[model[2].weight]["momentum_buffer"],
    )


def test_data_swapped_under_a_parameter_between_saves_is_followed(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with laststep.Checkpointer(
        tmp_path / "run",
        model=model,
        options=laststep.Options(flush="thread"),
        host_memory_bytes=64 << 20,
    ) as checkpointer:
        checkpointer.save(0)
        model.weight.data = torch.full((3, 3), 3.0)
        checkpointer.save(1)
        model.half()
        checkpointer.save(2)
    for step, dtype in ((1, "float32"), (2, "float16")):
        tensor = laststep.open(tmp_path / "run")[step].tensor("model/weight")
        assert tensor.dtype == dtype
        assert torch.equal(tensor[:].float(), torch.full((3, 3), 3.0))


def test_a_lazy_parameter_that_was_never_used_is_refused(tmp_path: Path) -> None:
    with raises(laststep.UsageError, where="weight of item 'state'"):
        laststep.save(nn.LazyLinear(3), tmp_path / "one")


def test_a_module_on_meta_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with raises(laststep.UsageError, where="weight of item 'state'", remedy="to_empty"):
        laststep.save(nn.Linear(2, 2, device="meta"), tmp_path / "one")


def test_a_sparse_buffer_comes_back(carry: Callable[..., object]) -> None:
    def make(value: float) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("adjacency", (torch.eye(3) * value).to_sparse())
        return module

    source, target = make(2.0), make(1.0)
    carry({"model": source}, {"model": target})
    assert torch.equal(target.adjacency.to_dense(), torch.eye(3) * 2)


def test_a_file_of_a_module_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = network()
    laststep.save(model, tmp_path / "one")
    loaded = load_file(tmp_path / "one" / "state.safetensors")
    assert loaded.keys() == model.state_dict().keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
