"""The state of a torch optimizer, by the names of its parameters.

Sets the state itself, because `Optimizer.load_state_dict` matches by position and casts fp32
moments of bf16 parameters to bf16. Works before the first step, when there is no state yet.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from laststep.constants import listed
from laststep.errors import UsageError
from laststep.state.provider import ABSENT, Absent, State, StateProvider, handing_over, has_absent
from laststep.state.tensors import put_tensor
from laststep.state.tree import Owned, TensorSpec

if TYPE_CHECKING:
    from laststep.state.tree import Path


log = logging.getLogger(__name__)

Names = Callable[[], dict[int, tuple[str, str]]]
"""Return id of a parameter → (item, name), as of now."""

_NOT_OPTIONS = frozenset({"params", "param_names"})
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that select how a step is computed. The live optimizer's values are kept, because they
determine the device on which `step` must be."""
_OTHER_FORMS = ("Adafactor", "LBFGS")
"""torch's optimizers with tensors of another shape than the parameter's."""


class OptimizerProvider(StateProvider):
    """Per-parameter state by name, and the options of every parameter group."""

    kind = "optimizer"
    passive = True

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names) -> None:
        self._optimizer = optimizer
        self._names = names
        self._has_warned = False

    def parts(self) -> tuple[object, ...]:
        return (self._optimizer,)

    def describe(self) -> State:
        parameters, item = self._parameters()
        live = self._optimizer.state
        # By id, because hashing a tensor is a Python call, and there are thousands.
        entries_of = dict(zip(map(id, live), live.values(), strict=True))
        groups: list[dict[str, Any]] = []
        for group in self._optimizer.param_groups:
            options = {key: option for key, option in group.items() if key not in _NOT_OPTIONS}
            groups.append({"params": {}, "options": options})
            if item:  # a dict, because pipeline stages may have different items
                groups[-1]["items"] = {item: len(group["params"])}
        state: dict[str, object] = {}
        for name, (parameter, number) in parameters.items():
            groups[number]["params"][name] = _form(parameter.dtype, parameter.shape)
            entries = entries_of.pop(id(parameter), None)
            if entries is not None:
                state[name] = dict(entries)
        if entries_of:
            kinds = [type(key).__name__ for key in live if id(key) in entries_of]
            raise UsageError(
                "cannot save optimizer state that belongs to no parameter",
                found=", ".join(kinds[:3]),
                remedy="write a provider for this optimizer (docs/guides/providers.md)",
            )
        return State(
            # The class detects the state and options of another kind of optimizer.
            value=Owned(type(self._optimizer).__name__, {"state": state, "groups": groups}),
            loose=((),),
        )

    def check(self, stored: object) -> list[str]:
        if not is_optimizer_state(stored):
            if isinstance(stored, dict) and "param_groups" in stored:
                how = "load_state_dict(), or laststep.dcp.Reader and set_state_dict()"
                return [f"was stored as torch's state_dict() or DCP has it; load it with {how}"]
            return ["is not the state of an optimizer"]
        ours, theirs = self._parameters()[0], group_of(stored)
        count = len(self._optimizer.param_groups)
        problems = []
        if count != len(stored["groups"]):
            problems = [f"has {count} parameter groups, but {len(stored['groups'])} were stored"]
        problems += map("has no stored state for parameter {}".format, sorted(ours.keys() - theirs))
        numbers = {name: number for name, (_parameter, number) in ours.items()}
        if not problems and not numbers.items() <= theirs.items():
            problems.append("groups its parameters differently than the stored one")
        if None in self._stored_as(ours, stored):
            problems.append("has parameter groups for which no options were stored")
        return problems

    def skips(self, stored: object) -> dict[Path, str | None]:
        """Refuse the state of parameters of another item, even if they have the same names, and of
        another dtype or shape: a fused step would write past the end of smaller moments. Skip the
        state of parameters that this optimizer does not have."""
        if not is_optimizer_state(stored):
            return {}
        ours, item = self._parameters()
        theirs: set[str] = set()
        for group in stored["groups"]:
            theirs.update(group.get("items", ()))
        if item and theirs and item not in theirs:  # older checkpoints have none
            listed = ", ".join(sorted(theirs))
            return {
                (): f"belongs to the parameters of {item}, but the stored one to those of {listed}"
            }
        skipped: dict[Path, str | None] = {}
        for group in stored["groups"]:
            for name, form in group["params"].items():
                if name in ours:
                    parameter = ours[name][0]
                    live = _form(parameter.dtype, parameter.shape)
                    if live != form:
                        what = f"state of {name}: stored for {form}, live is {live}"
                        skipped["state", name] = what
        kind = type(self._optimizer)
        if kind.__module__.startswith("torch.optim.") and kind.__name__ not in _OTHER_FORMS:
            for name, (parameter, _) in ours.items():
                entries, shapes = stored["state"].get(name), ((), (1,), tuple(parameter.shape))
                for entry in entries.values() if isinstance(entries, dict) else ():
                    if isinstance(entry, TensorSpec) and entry.shape not in shapes:
                        what = f"state of {name}: has a {entry} for {list(parameter.shape)}"
                        skipped.setdefault(("state", name), what)
        for name in sorted(group_of(stored).keys() - ours):
            skipped["state", name] = None
        return skipped

    def destinations(self, paths: list[Path]) -> list[object]:
        """Put state on the device and in the layout of its parameter. As in torch, `step` stays on
        the host unless the group is fused or capturable."""
        ours, groups = self._parameters()[0], self._optimizer.param_groups
        found: list[object] = ["cpu"] * len(paths)
        for at, path in enumerate(paths):
            match path:
                case ("state", str(name), key, *_) if name in ours:
                    parameter, number = ours[name]
                    on_device = groups[number].get("capturable") or groups[number].get("fused")
                    if on_device or key != "step":
                        found[at] = parameter
        return found

    def restore(self, value: object) -> None:
        if not is_optimizer_state(value):
            return  # `check` has already reported it
        with handing_over(type(self._optimizer).__name__):
            parameters, live = self._parameters()[0], self._optimizer.state
            stored = value["state"]
            # State that only other ranks need is ABSENT too; ignore it here.
            whole = not has_absent([list(map(stored.get, parameters)), value["groups"]])
            for name, (parameter, _) in parameters.items():
                entries = stored.get(name, ABSENT)
                if entries is not ABSENT:
                    loaded = {key: entry for key, entry in entries.items() if not has_absent(entry)}
                    if loaded or not entries:
                        kept = live[parameter]
                        if whole:  # delete state that was added after the checkpoint
                            kept.clear()
                        kept.update(loaded)
                elif whole:
                    live.pop(parameter, None)
            stored_as = self._stored_as(parameters, value)
            replaced: dict[str, None] = {}
            for group, number in zip(self._optimizer.param_groups, stored_as, strict=True):
                options = {} if number is None else _entries(value["groups"][number]["options"])
                for key, entry in options.items():
                    if key in _HOW or has_absent(entry):
                        continue
                    # A tensor lr stays the same tensor.
                    if isinstance(group.get(key), torch.Tensor):
                        put_tensor(group[key], entry)
                    else:
                        if key in group and type(entry) is float and entry != group[key]:
                            replaced[f"{key} {entry:g} instead of {group[key]!r}"] = None
                        group[key] = entry
        if replaced:
            log.info("%s: restored %s", type(self._optimizer).__name__, listed(replaced, 5))

    def _stored_as(
        self, parameters: dict[str, tuple[torch.Tensor, int]], stored: dict[str, Any]
    ) -> list[int | None]:
        """Return, for each live group, the number of its stored group, found by the names of its
        parameters; None if there is none or another live group has it too. A group without
        parameters, which a pipeline stage may have, is matched by position."""
        theirs, groups = group_of(stored), self._optimizer.param_groups
        matches: list[set[int]] = [set() for _ in groups]
        for name, (_parameter, number) in parameters.items():
            if name in theirs:
                matches[number].add(theirs[name])
        if len(groups) == len(stored["groups"]):
            for position, group in enumerate(groups):
                if not group["params"]:
                    matches[position] = {position}
        numbers = [match.pop() if len(match) == 1 else None for match in matches]
        return [number if numbers.count(number) == 1 else None for number in numbers]

    def _parameters(self) -> tuple[dict[str, tuple[torch.Tensor, int]], str]:
        """Return every parameter by its name, with the number of its group; and the item that
        contains them, empty if there are several: the names then include it. A name is the one that
        modules and dicts know, else the optimizer's own in `param_names`, else the position."""
        known, groups = self._names(), self._optimizer.param_groups
        here = chain.from_iterable(map(itemgetter("params"), groups))
        items = set(map(itemgetter(0), filter(None, map(known.get, map(id, here)))))
        parameters: dict[str, tuple[torch.Tensor, int]] = {}
        by_position = 0
        for g, group in enumerate(groups):
            own = group.get("param_names")
            for i, parameter in enumerate(group["params"]):
                item, name = known.get(id(parameter), ("", ""))
                if name and len(items) > 1:
                    name = f"{item}:{name}"
                elif not name and own:
                    name = own[i]
                elif not name:
                    name = f"group{g}.{i}"
                    by_position += 1
                if name in parameters and parameters[name][0] is not parameter:
                    raise UsageError(
                        "two parameters of the optimizer have the same name",
                        remedy="pass their modules as items too, under different names",
                    )
                parameters[name] = parameter, g
        if by_position and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%d of %d parameters of an optimizer are not in any item: their state is matched "
                "by position; restore into the same order, or pass the object that holds them "
                "(model=…, or a dict of them) as an item",
                by_position,
                len(parameters),
            )
        return parameters, items.pop() if len(items) == 1 else ""


@functools.lru_cache(maxsize=4096)
def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def is_optimizer_state(stored: object) -> TypeGuard[dict[str, Any]]:
    """Return True if a tree is an optimizer's state as described here; parts may be ABSENT."""
    if not isinstance(stored, dict) or not {"state", "groups"} <= set(stored):
        return False
    state, groups = stored["state"], stored["groups"]
    return (
        isinstance(state, dict)
        and {str}.issuperset(map(type, state))
        and {dict, Absent}.issuperset(map(type, state.values()))
        and isinstance(groups, list)
        and all(map(_is_group, groups))
    )


def torch_form(state: object) -> object:
    """Return an optimizer's state as `Optimizer.load_state_dict` takes it, with the names of the
    parameters in place of their numbers; anything else as it is."""
    if not is_optimizer_state(state) or len(state) > 2:
        return state
    groups = [{**group["options"], "params": [*group["params"]]} for group in state["groups"]]
    return {"state": state["state"], "param_groups": groups}


def _is_group(group: object) -> bool:
    match group:
        case {"params": dict() | Absent() as params, "options": dict() | Absent(), **more}:
            items, forms = more.get("items", {}), _entries(params)
            return (
                isinstance(items, dict)
                and {str}.issuperset(map(type, (*items, *forms)))
                and {str, Absent}.issuperset(map(type, forms.values()))
            )
    return False


def group_of(stored: dict[str, Any]) -> dict[str, int]:
    """Return the number of the group of each parameter whose state is stored."""
    numbers: dict[str, int] = {}
    for number, group in enumerate(stored["groups"]):
        numbers |= dict.fromkeys(_entries(group["params"]), number)
    return numbers


def _entries(node: dict[str, Any] | Absent) -> dict[str, Any]:
    return {} if isinstance(node, Absent) else node
