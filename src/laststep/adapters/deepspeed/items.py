"""The items of a DeepSpeed engine's state: weights, optimizer, counts of steps.

The weight that is stored under a parameter's name is the one that the optimizer steps, in fp32: it
loads into a plain fp32 model, and after a restore the module's weights are made from it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laststep.adapters.deepspeed.names import names_in
from laststep.adapters.deepspeed.places import known_optimizer, places, round_weights
from laststep.adapters.deepspeed.seams import need
from laststep.adapters.flat_state import FlatMember, FlatModule, FlatOptimizer, Parameters
from laststep.errors import UsageError
from laststep.state.provider import ABSENT, State, StateProvider

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_LAYOUT = frozenset({"name", "moe"})
"""Options by which DeepSpeed knows a group of experts: they follow from the number of ranks."""


def model(engine: object) -> EngineModule:
    """The fp32 weights, and the buffers, of the module that a DeepSpeed engine trains."""
    return EngineModule(engine)


def optimizer(engine: object) -> StateProvider:
    """The state of the torch optimizer that the engine steps, by the names of the parameters."""
    known = known_optimizer(engine)
    stepped = getattr(known, "optimizer", known)
    return FlatOptimizer(stepped, lambda: list(_members(engine)), live_options=_OF_LAYOUT)


def progress(engine: object) -> StateProvider:
    """The engine's counts of steps and samples, and the loss scale of fp16."""
    return _StepCounts(engine)


class EngineModule(FlatModule):
    """The module of an engine, as a plain one is stored."""

    def __init__(self, engine: object) -> None:
        module = need(engine, "module")
        super().__init__(module, self._stepped, names_in(module))
        self._engine = engine
        self.leaves_frozen = False
        """Whether parameters that are not trained are left out."""

    def describe(self) -> State:
        state = super().describe()
        if self.leaves_frozen and isinstance(state.value, dict):
            for name, parameter in self._module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.value.pop(self._name(name), None)
        return state

    def restore(self, value: object) -> None:
        super().restore(value)
        round_weights(self._engine)

    def _stepped(self) -> Parameters:
        weights = {id(place.parameter): place.weight() for place in places(self._engine)}
        laid: dict[str, object] = {
            self._name(name): weights[id(parameter)]
            for name, parameter in self._module.named_parameters(remove_duplicate=False)
            if id(parameter) in weights
        }
        return Parameters(laid, set(weights))


class _StepCounts(StateProvider):
    kind = "progress"

    _ENGINE = ("global_steps", "global_samples", "skipped_steps")
    _PIPELINE = ("micro_offset",)  # from which layers take their seeds
    _SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def describe(self) -> State:
        counts = {name: need(self._engine, name) for name in self._ENGINE}
        return State(
            value={
                "counts": counts,
                "pipeline": _known(need(self._engine, "module"), self._PIPELINE),
                "scale": _known(self._scaler(), self._SCALE),
            }
        )

    def restore(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        engine: Any = self._engine
        owners = {"counts": engine, "pipeline": engine.module, "scale": self._scaler()}
        for part, owner in owners.items():
            entries = value.get(part, ABSENT)
            for name, entry in {} if entries is ABSENT else entries.items():
                if entry is not ABSENT:
                    setattr(owner, name, entry)
        # So many micro-steps make a step now; with another number of ranks it may be another.
        engine.micro_steps = engine.global_steps * need(engine, "gradient_accumulation_steps")()

    def _scaler(self) -> object:
        known = known_optimizer(self._engine)
        return getattr(known, "loss_scaler", None) or getattr(known, "loss_scale_config", None)


def _known(owner: object, names: tuple[str, ...]) -> dict[str, object]:
    return {name: getattr(owner, name) for name in names if hasattr(owner, name)}


def _members(engine: object) -> Iterator[FlatMember]:
    module = need(engine, "module")
    whole = names_in(module)
    names = {id(parameter): whole(name) for name, parameter in module.named_parameters()}
    for place in places(engine):
        if place.group < 0:
            continue
        if id(place.parameter) not in names:
            raise UsageError(
                "DeepSpeed's optimizer has a parameter that is none of the module's",
                found=f"one of shape {list(place.shape)}",
                remedy="make the optimizer from the parameters of the module",
            )
        yield FlatMember(
            name=names[id(place.parameter)],
            group=place.group,
            dtype=place.memory.dtype,
            shape=place.shape,
            holder=place.memory,
            first=place.first,
            last=place.last,
            size=place.memory.numel(),
            layout=place.layout,
        )
