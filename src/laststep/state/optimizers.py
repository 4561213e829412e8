"""The state of a torch optimizer, by the names of its parameters.

Sets the state itself, because `Optimizer.load_state_dict` matches by position and casts fp32
moments of bf16 parameters to bf16. Works before the first step, when there is no state yet. Imports
no torch.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

from laststep.errors import UsageError
from laststep.state.provider import ABSENT, Absent, State, StateProvider, handing_over, has_absent
from laststep.state.tensors import is_tensor, put_tensor
from laststep.state.tree import Owned, TensorSpec

if TYPE_CHECKING:
    import torch

    from laststep.state.tree import Path


log = logging.getLogger(__name__)

Names = Callable[[], dict[int, tuple[str, str]]]
"""Return id of a parameter → (item, name), as of now."""

_NOT_OPTIONS = frozenset({"params", "param_names"})
_HOW = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Options that select how a step is computed. The live optimizer's values are kept, because they
determine the device on which `step` must be."""


class OptimizerProvider(StateProvider):
    """Per-parameter state by name, and the options of every parameter group."""

    kind = "optimizer"
    cheap = True
    passive = True

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names) -> None:
        """`names` returns item and name of parameters. A parameter that it does not contain is
        named by the optimizer's `param_names`, or else by position."""
        self._optimizer = optimizer
        self._names = names
        self._told = False
        """True once the warning about state matched by position has been logged."""

    def parts(self) -> tuple[object, ...]:
        return (self._optimizer,)

    def describe(self) -> State:
        names, item = self._named_in()
        state = self._optimizer.state
        # By id, because hashing a tensor is a Python call, and there are thousands.
        held = dict(zip(map(id, state), state.values(), strict=True))
        groups = []
        for group in self._optimizer.param_groups:
            options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
            params = {names[id(p)]: _form(p.dtype, p.shape) for p in group["params"]}
            groups.append({"params": params, "options": options})
            if item:  # a dict, because pipeline stages may have different items
                groups[-1]["items"] = {item: len(params)}
        if not held.keys() <= names.keys():
            others = [key for key in state if id(key) not in names]
            raise UsageError(
                "cannot save optimizer state that belongs to no parameter",
                found=", ".join(type(key).__name__ for key in others[:3]),
                remedy="write a provider for this optimizer (docs/guides/providers.md)",
            )
        by_name = {name: dict(held[key]) for key, name in names.items() if key in held}
        return State(
            # The class detects the state and options of another kind of optimizer.
            value=Owned(type(self._optimizer).__name__, {"state": by_name, "groups": groups}),
            loose=((),),
        )

    def check(self, stored: object) -> list[str]:
        if not is_optimizer_state(stored):
            return [_other_form(stored)]
        ours, theirs = self._parameters(), group_of(stored)
        count = len(self._optimizer.param_groups)
        problems = []
        if count != len(stored["groups"]):
            problems.append(
                f"has {count} parameter groups, but {len(stored['groups'])} were stored"
            )
        for name in sorted(ours.keys() - theirs):
            problems.append(f"has no stored state for parameter {name}")  # noqa: PERF401
        if not problems and any(theirs[name] != number for name, (_, number) in ours.items()):
            problems.append("groups its parameters differently than the stored one")
        alone = [str(n) for n, stored_as in enumerate(self._stored_as(stored)) if stored_as is None]
        if alone:
            problems.append(f"has no stored options for parameter groups {', '.join(alone)}")
        return problems

    def skips(self, stored: object) -> dict[Path, str | None]:
        """Refuse the state of parameters of another item, even if they have the same names, and of
        parameters of another dtype or shape: moments have the parameter's shape, and a fused step
        would write past their end. Skip the state of parameters that this optimizer does not
        have."""
        if not is_optimizer_state(stored):
            return {}
        item, ours = self._named_in()[1], self._parameters()
        theirs = {item for group in stored["groups"] for item in group.get("items", ())}
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
        if _keeps_to_forms(type(self._optimizer)):
            for name, (parameter, _) in ours.items():
                odd = _odd_entry(stored["state"].get(name, {}), tuple(parameter.shape))
                if odd is not None:
                    skipped.setdefault(("state", name), f"state of {name}: {odd}")
        for name in sorted(group_of(stored).keys() - ours):
            skipped["state", name] = None
        return skipped

    def destinations(self, paths: list[Path]) -> list[object]:
        """Put state on the device and in the layout of its parameter. As in torch, `step` stays on
        the host unless the group is fused or capturable."""
        ours, groups = self._parameters(), self._optimizer.param_groups
        found: list[object] = []
        for path in paths:
            to: object = "cpu"
            match path:
                case ("state", str(name), key, *_) if name in ours:
                    parameter, number = ours[name]
                    on_device = groups[number].get("capturable") or groups[number].get("fused")
                    to = parameter if on_device or key != "step" else "cpu"
            found.append(to)
        return found

    def restore(self, value: object) -> None:
        if is_optimizer_state(value):  # else `check` has reported it
            with handing_over(type(self._optimizer).__name__):
                self._restore(value)

    def _restore(self, value: dict[str, Any]) -> None:
        parameters, live = self._parameters(), self._optimizer.state
        # State that only other ranks need is ABSENT too; ignore it here.
        stored = {name: of for name, of in value["state"].items() if name in parameters}
        whole = not has_absent([list(stored.values()), value["groups"]])
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
        for group, number in zip(self._optimizer.param_groups, self._stored_as(value), strict=True):
            options = {} if number is None else _entries(value["groups"][number]["options"])
            for key, entry in options.items():
                if key in _HOW or has_absent(entry):
                    continue
                if is_tensor(group.get(key)):  # a tensor lr stays the same tensor
                    put_tensor(group[key], entry)
                else:
                    group[key] = entry

    def _stored_as(self, stored: dict[str, Any]) -> list[int | None]:
        """Return, for each live group, the number of its stored group, found by the names of its
        parameters.

        A group without parameters, which a pipeline stage may have, is matched by position. None
        for a group without a match, and for two live groups that match the same stored group.
        """
        theirs, names = group_of(stored), self._named_in()[0]
        groups = self._optimizer.param_groups
        numbers: list[int | None] = []
        for position, group in enumerate(groups):
            known = {theirs.get(names[id(p)]) for p in group["params"]} - {None}
            if not group["params"] and len(groups) == len(stored["groups"]):
                known = {position}
            numbers.append(known.pop() if len(known) == 1 else None)
        return [number if numbers.count(number) == 1 else None for number in numbers]

    def _parameters(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return every parameter by its name, with the number of its group."""
        names = self._named_in()[0]
        groups = enumerate(self._optimizer.param_groups)
        return {names[id(p)]: (p, number) for number, group in groups for p in group["params"]}

    def _named_in(self) -> tuple[dict[int, str], str]:
        """Return the names of parameters by id, and the item that contains them. The item is empty
        if there are several; the names then include it.

        A name is the one that modules and dicts know, else the optimizer's own, else the position.
        """
        known, groups = self._names(), self._optimizer.param_groups
        ids = [list(map(id, group["params"])) for group in groups]
        items = {known[key][0] for key in chain.from_iterable(ids) if key in known}
        names: dict[int, str] = {}
        by_position = 0
        for g, (group, keys) in enumerate(zip(groups, ids, strict=True)):
            own = group.get("param_names")
            for i, key in enumerate(keys):
                item, name = known.get(key, ("", ""))
                if name:
                    names[key] = f"{item}:{name}" if len(items) > 1 else name
                elif own:
                    names[key] = own[i]
                else:
                    names[key] = f"group{g}.{i}"
                    by_position += 1
        if by_position and not self._told:
            self._told = True
            log.warning(
                (
                    "%d of %d parameters of an optimizer are not in any item: their state is "
                    "matched by position; restore into the same order, or pass the object that "
                    "holds them (model=…, or a dict of them) as an item"
                ),
                by_position,
                len(names),
            )
        if len(set(names.values())) != len(names):
            raise UsageError(
                "two parameters of the optimizer have the same name",
                remedy="pass their modules as items too, under different names",
            )
        return names, items.pop() if len(items) == 1 else ""


@functools.lru_cache(maxsize=4096)
def _form(dtype: torch.dtype, shape: torch.Size) -> str:
    """Return dtype and shape of a parameter as text, for messages and for comparison."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def is_optimizer_state(stored: object) -> TypeGuard[dict[str, Any]]:
    """Return True if a tree has the form that `OptimizerProvider` describes; parts of it may be
    ABSENT."""
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


def _other_form(stored: object) -> str:
    """Describe a stored tree of another form, and how to load it."""
    match stored:
        case {"state": dict() as state, "param_groups": _, **more} if not more:
            if any(isinstance(key, str) for key in state):
                what = "was stored by DCP, as get_state_dict() has it"
                how = "dcp.load(…, storage_reader=laststep.dcp.Reader(run))"
                return f"{what}; load it with {how} and set_state_dict(), then save it again"
            how = "load it with the optimizer's own load_state_dict()"
            return f"was stored by position, as torch's state_dict() has it; {how}"
    return "is not the state of an optimizer"


def _keeps_to_forms(kind: type) -> bool:
    """Return True if all state of a parameter is single numbers or has the parameter's shape. This
    holds for torch's optimizers except those that factorise moments or keep a history."""
    of_torch = kind.__module__.startswith("torch.optim.")
    return of_torch and kind.__name__ not in ("Adafactor", "LBFGS")


def _odd_entry(entries: object, shape: tuple[int, ...]) -> str | None:
    """Describe the first entry of a parameter's state with an unexpected shape, or return None."""
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, TensorSpec) and entry.shape not in ((), (1,), shape):
            return f"stored {key} is {list(entry.shape)}, the parameter is {list(shape)}"
    return None


def group_of(stored: dict[str, Any]) -> dict[str, int]:
    """Return the number of the group of each parameter whose state is stored."""
    groups = enumerate(stored["groups"])
    return {name: number for number, group in groups for name in _entries(group["params"])}


def _entries(node: dict[str, Any] | Absent) -> dict[str, Any]:
    """Return the loaded entries of a dict; a dict that is ABSENT in a partial restore has none."""
    return {} if isinstance(node, Absent) else node
