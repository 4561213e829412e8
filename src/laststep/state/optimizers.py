"""The state of a torch optimizer, by the names of its parameters.

Sets state itself: `Optimizer.load_state_dict` goes by position and casts fp32 moments of bf16
parameters to bf16. Works before the first step, when there is no state yet. Imports no torch.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from laststep.errors import UsageError
from laststep.state.provider import ABSENT, Absent, State, StateProvider, handing_over, has_absent
from laststep.state.tensors import is_tensor, put_tensor
from laststep.state.tree import Owned, TensorSpec

if TYPE_CHECKING:
    import torch

    from laststep.state.tree import Path


log = logging.getLogger(__name__)

Names = Callable[[], dict[int, tuple[str, str]]]
"""id of a parameter → (item, name), as it is now."""

_NOT_OPTIONS = frozenset({"params", "param_names"})
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How a step is computed is the live optimizer's choice: it decides where `step` has to lie."""


class OptimizerProvider(StateProvider):
    """Per-parameter state by name, and the options of every parameter group."""

    kind = "optimizer"
    cheap = True
    passive = True

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names) -> None:
        """`names` tells item and name of parameters; others go by the optimizer's or by place."""
        self._optimizer = optimizer
        self._names = names
        self._told = False
        """Whether the log says that state goes by place."""

    def parts(self) -> tuple[object, ...]:
        return (self._optimizer,)

    def describe(self) -> State:
        names, item = self._named_in()
        state = self._optimizer.state
        # By id: the hash of a tensor is a Python call, and there are thousands.
        held = dict(zip(map(id, state), state.values(), strict=True))
        groups = []
        for group in self._optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            own = map(names.__getitem__, map(id, group["params"]))
            forms = _forms_of(tuple(map(_FORM, group["params"])))
            params = dict(zip(own, forms, strict=True))
            groups.append({"params": params, "options": options})
            if item:  # a dict: stages of a pipeline have theirs under different items
                groups[-1]["items"] = {item: len(params)}
        if not held.keys() <= names.keys():
            others = [key for key in state if id(key) not in names]
            raise UsageError(
                "cannot save optimizer state that belongs to none of its parameters",
                found=", ".join(type(key).__name__ for key in others[:3]),
                remedy="write a provider for this optimizer (docs/guides/providers.md)",
            )
        by_name = {name: dict(held[key]) for key, name in names.items() if key in held}
        return State(
            # Another rule's state would be taken for this one's, and its options with it.
            value=Owned(type(self._optimizer).__name__, {"state": by_name, "groups": groups}),
            loose=((),),
        )

    def check(self, stored: object) -> list[str]:
        if _is_of_torch(stored):
            if any(isinstance(key, str) for key in stored["state"]):
                what = "was stored by DCP, as get_state_dict() has it"
                how = "dcp.load(…, storage_reader=laststep.adapters.dcp.Reader(run))"
                return [f"{what}; load it with {how} and set_state_dict(), then save it anew"]
            how = "load it with the optimizer's own load_state_dict()"
            return [f"was stored by position, as torch's state_dict() has it; {how}"]
        if not is_optimizer_state(stored):
            return ["is not the state of an optimizer"]
        theirs = group_of(stored)
        names = self._named()
        groups = self._optimizer.param_groups
        ours = {names[id(p)]: number for number, g in enumerate(groups) for p in g["params"]}
        problems = []
        if len(groups) != len(stored["groups"]):
            problems.append(
                f"has {len(groups)} parameter groups, stored are {len(stored['groups'])}"
            )
        problems += [
            f"has no stored state for its parameter {n}" for n in sorted(ours.keys() - theirs)
        ]
        if not problems and any(theirs[name] != number for name, number in ours.items()):
            problems.append("has its parameters in other groups than the stored one")
        alone = [str(n) for n, alike in enumerate(self._alike(stored)) if alike is None]
        if alone:
            problems.append(f"has no stored options for its groups {', '.join(alone)}")
        return problems

    def _alike(self, stored: dict[str, Any]) -> list[int | None]:
        """The stored group that each group is, by the names of its parameters. One without any, as
        a stage of a pipeline may have it, goes by place; of two that were one, neither is it."""
        theirs, names = group_of(stored), self._named()
        groups = self._optimizer.param_groups
        alike: list[int | None] = []
        for place, group in enumerate(groups):
            known = {theirs.get(names[id(p)]) for p in group["params"]} - {None}
            if not group["params"] and len(groups) == len(stored["groups"]):
                known = {place}
            alike.append(known.pop() if len(known) == 1 else None)
        return [number if alike.count(number) == 1 else None for number in alike]

    def lacks(self, stored: object) -> list[Path]:
        """The state of parameters that it does not have."""
        if not is_optimizer_state(stored):
            return []
        ours = set(self._named().values())
        return [("state", name) for name in sorted(group_of(stored).keys() - ours)]

    def models(self, paths: list[Path]) -> list[object]:
        """State lies as its parameter does."""
        parameters: dict[object, object] = {name: p for p, name, _ in self._walk()}
        return [
            parameters.get(path[1]) if path[:1] == ("state",) and len(path) > 2 else None
            for path in paths
        ]

    def refuses(self, stored: object) -> dict[Path, str]:
        """The state of parameters of another item, though they have the same names; and that of
        parameters of another form: moments are of the parameter's own, and a fused step would write
        past their end."""
        if not is_optimizer_state(stored):
            return {}
        item, theirs = self._named_in()[1], _items_of(stored)
        if item and theirs and item not in theirs:
            listed = ", ".join(sorted(theirs))
            return {(): f"is of the parameters of {item}, the stored one of those of {listed}"}
        live = {name: _form(parameter) for parameter, name, _ in self._walk()}
        refused: dict[Path, str] = {}
        for group in stored["groups"]:
            for name, form in group["params"].items():
                ours = live.get(name, form)
                if ours != form:
                    refused["state", name] = f"state of {name}: stored for {form}, live is {ours}"
        if _keeps_to_forms(type(self._optimizer)):
            for parameter, name, _ in self._walk():
                odd = _odd_entry(stored["state"].get(name, {}), tuple(parameter.shape))
                if odd is not None:
                    refused.setdefault(("state", name), f"state of {name}: {odd}")
        return refused

    def devices(self, paths: list[Path]) -> list[str]:
        """As torch does: `step` stays on the host unless the group is fused or capturable."""
        parameters = {name: (p, g) for p, name, g in self._walk()}

        def device(path: Path) -> str:
            if len(path) < 3 or path[0] != "state" or path[1] not in parameters:
                return "cpu"
            parameter, group = parameters[path[1]]
            on_host = path[2] == "step" and not (group.get("capturable") or group.get("fused"))
            return "cpu" if on_host else str(parameter.device)

        return [device(path) for path in paths]

    def restore(self, value: object) -> None:
        if is_optimizer_state(value):  # else `check` has said so
            with handing_over(type(self._optimizer).__name__):
                self._restore(value)

    def _restore(self, value: dict[str, Any]) -> None:
        parameters = {name: p for p, name, _ in self._walk()}
        for name, entries in value["state"].items():
            parameter = parameters.get(name)
            if parameter is None or entries is ABSENT:
                continue
            restored = {key: entry for key, entry in entries.items() if not has_absent(entry)}
            if restored or not entries:
                self._optimizer.state[parameter].update(restored)
        # What other ranks have is ABSENT too, and nothing to this one.
        mine = [entries for name, entries in value["state"].items() if name in parameters]
        if not has_absent([mine, value["groups"]]):
            self._forget_newer(parameters, value["state"])
        for group, alike in zip(self._optimizer.param_groups, self._alike(value), strict=True):
            stored = {} if alike is None else _entries(value["groups"][alike]["options"])
            for key, entry in stored.items():
                if key not in _HOW and not has_absent(entry):
                    _set_option(group, key, entry)

    def _forget_newer(
        self, parameters: dict[str, torch.Tensor], stored: dict[str, dict[str, object]]
    ) -> None:
        """After a whole restore: state that came to be after the checkpoint goes."""
        for name, parameter in parameters.items():
            if name not in stored:
                self._optimizer.state.pop(parameter, None)
                continue
            kept = self._optimizer.state[parameter]
            entries = {key: kept[key] for key in stored[name]}
            kept.clear()
            kept.update(entries)

    def _walk(self) -> list[tuple[torch.Tensor, str, dict[str, object]]]:
        names = self._named()
        return [(p, names[id(p)], g) for g in self._optimizer.param_groups for p in g["params"]]

    def _named(self) -> dict[int, str]:
        """id of a parameter → its name."""
        return self._named_in()[0]

    def _named_in(self) -> tuple[dict[int, str], str]:
        """The names, and the item that those are in which do not say it, if one is known."""
        known = self._names()
        ids = [tuple(map(id, group["params"])) for group in self._optimizer.param_groups]
        named, item, by_place = _named(
            tuple(tuple(map(known.get, group)) for group in ids),
            tuple(tuple(group.get("param_names") or ()) for group in self._optimizer.param_groups),
        )
        if by_place and not self._told:
            self._told = True
            log.warning(
                "%d of %d parameters of an optimizer are in no item: their state goes by place, so "
                "restore it into one that has them in the same order, or pass what holds them "
                "(model=…, or a dict of them) as an item too",
                by_place,
                len(named),
            )
        names = dict(zip(chain.from_iterable(ids), named, strict=True))
        if len(set(names.values())) != len(names):
            raise UsageError(
                "two parameters of the optimizer have the same name",
                remedy="pass their modules as items too, under different names",
            )
        return names, item


@functools.lru_cache(maxsize=16)
def _named(
    known: tuple[tuple[tuple[str, str] | None, ...], ...], own: tuple[tuple[str, ...], ...]
) -> tuple[tuple[str, ...], str, int]:
    """The names of the parameters of all groups: by the items and names that modules and dicts know
    them under, or by the optimizer's own names, or by place; the one item that they are in, which
    they do not say then; and how many go by place."""
    items = {in_module[0] for group in known for in_module in group if in_module is not None}
    names: list[str] = []
    by_place = 0
    for g, group in enumerate(known):
        for i, in_module in enumerate(group):
            item, name = in_module or ("", "")
            if name:
                names.append(f"{item}:{name}" if len(items) > 1 else name)
            elif own[g]:
                names.append(own[g][i])
            else:
                names.append(f"group{g}.{i}")
                by_place += 1
    return tuple(names), items.pop() if len(items) == 1 else "", by_place


def _form(parameter: torch.Tensor) -> str:
    """Dtype and shape of a parameter, for a person and for comparison."""
    return _forms_of((_FORM(parameter),))[0]


_FORM: Final = operator.attrgetter("dtype", "shape")


@functools.lru_cache(maxsize=64)
def _forms_of(forms: tuple[tuple[torch.dtype, torch.Size], ...]) -> tuple[str, ...]:
    return tuple(f"{str(dtype).removeprefix('torch.')}{list(shape)}" for dtype, shape in forms)


def is_optimizer_state(stored: object) -> TypeGuard[dict[str, Any]]:
    """Whether a tree is what an `OptimizerProvider` describes; parts of it may be ABSENT."""
    if not isinstance(stored, dict) or not {"state", "groups"} <= set(stored):
        return False
    state, groups = stored["state"], stored["groups"]
    return (
        isinstance(state, dict)
        and all(isinstance(name, str) for name in state)
        and all(isinstance(entry, dict) or entry is ABSENT for entry in state.values())
        and isinstance(groups, list)
        and all(map(_is_group, groups))
    )


def _is_group(group: object) -> bool:
    match group:
        case {"params": dict() | Absent() as params, "options": dict() | Absent(), **more}:
            items = more.get("items", {})
            forms = _entries(params)
            return (
                isinstance(items, dict)
                and all(isinstance(name, str) for name in (*items, *forms))
                and all(isinstance(form, str) or form is ABSENT for form in forms.values())
            )
    return False


def _items_of(stored: dict[str, Any]) -> set[str]:
    """The items of the parameters whose names do not say it; none in older checkpoints."""
    return {item for group in stored["groups"] for item in group.get("items", ())}


def _is_of_torch(stored: object) -> TypeGuard[dict[str, Any]]:
    """Whether it is what an optimizer's own state_dict() gives."""
    return (
        isinstance(stored, dict)
        and set(stored) == {"state", "param_groups"}
        and isinstance(stored["state"], dict)
    )


def _keeps_to_forms(kind: type) -> bool:
    """Whether state of a parameter is single numbers, or has the parameter's own shape: that is so
    of torch's own optimizers, but for those that factorise moments or keep a history."""
    of_torch = kind.__module__.startswith("torch.optim.")
    return of_torch and kind.__name__ not in ("Adafactor", "LBFGS")


def _odd_entry(entries: object, shape: tuple[int, ...]) -> str | None:
    """What of a parameter's state has a shape of its own, in words."""
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, TensorSpec) and entry.shape not in ((), (1,), shape):
            return f"stored {key} is {list(entry.shape)}, the parameter is {list(shape)}"
    return None


def group_of(stored: dict[str, Any]) -> dict[str, int]:
    """The number of the group of each parameter whose state is stored."""
    groups = enumerate(stored["groups"])
    return {name: number for number, group in groups for name in _entries(group["params"])}


def _entries(node: dict[str, Any] | Absent) -> dict[str, Any]:
    """What is loaded of a dict: an empty one is ABSENT in a partial restore."""
    return {} if isinstance(node, Absent) else node


def _set_option(group: dict[str, object], key: str, entry: object) -> None:
    live = group.get(key)
    if is_tensor(live):  # a tensor lr stays the same tensor
        put_tensor(live, entry)  # type: ignore[arg-type]
    else:
        group[key] = entry
