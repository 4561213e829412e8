"""An item that does not exist yet when the Checkpointer is made, or is replaced later.

Until it is there it has no parts and says nothing of itself; whoever describes or restores it asks
for it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from laststep.checks import shown
from laststep.errors import Usage
from laststep.state.provider import AroundProvider, StateProvider

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.state.provider import WhenRanksChange


class Late(AroundProvider):
    """Names an item by a function that gives it: `Late(lambda: trainer.optimizer)`. Each save and
    restore asks the function for what there is by then; it gives None while there is nothing.
    `make` makes the item of what it gives, once for as long as that is the same."""

    def __init__(
        self, held: Callable[[], object], make: Callable[[Any], object] | None = None
    ) -> None:
        for function in (held,) if make is None else (held, make):
            if not callable(function):
                raise Usage(
                    "a late item is not a function", expected="a function that gives the item",
                    found=shown(function), remedy="pass Late(lambda: item), or the item itself",
                )  # fmt: skip
        self._held, self._make = held, make
        self._known: tuple[object, object] = (None, None)
        """What was held last, and the item that is made of it."""
        self._source = self
        self._provide: Callable[[object], StateProvider] | None = None
        self._made: tuple[object, StateProvider] | None = None
        """The item that was last asked for something, and its provider."""

    def around(self, provide: Callable[[object], StateProvider]) -> Late:
        """One for a Checkpointer, that makes its provider so; of one thing all have one item."""
        made = Late(self._held, self._make)
        made._source, made._provide = self._source, provide
        return made

    def thing(self) -> object:
        """The item that there is by now; None where that is nothing."""
        source, held = self._source, self._held()
        if held is not source._known[0]:
            if self._held() is not held:
                raise Usage(
                    "a late item is another one each time that it is asked for",
                    expected="a function that gives what there is", found=shown(held),
                    remedy="keep it and give that, as Late(lambda: self.model) does; what is made "
                    "of it goes behind: Late(lambda: self.model, laststep.trainable)",
                )  # fmt: skip
            item = held if self._make is None or held is None else self._make(held)
            source._known = (held, item)
        return source._known[1]

    def is_there(self) -> bool:
        """Whether it is there, which makes its provider. What keeps it from that, a save tells."""
        with contextlib.suppress(Exception):
            return self._inner is not None
        return False

    @property
    def _inner(self) -> StateProvider:  # type: ignore[override]
        thing = self.thing()
        if self._made is None or self._made[0] is not thing:
            if thing is None or self._provide is None:
                raise Usage(
                    "a late item does not exist yet", expected="what its function gives",
                    found="None", remedy="save and restore it once it is made, or leave it out: "
                    "restore(only=[…])",
                )  # fmt: skip
            self._made = (thing, self._provide(thing))
        return self._made[1]

    @property
    def is_made(self) -> bool:
        return self._made is not None

    def parts(self) -> tuple[object, ...]:
        return () if self._made is None else self._inner.parts()

    def _told(self, name: str, otherwise: Any) -> Any:
        return otherwise if self._made is None else getattr(self._inner, name, otherwise)

    @property
    def kind(self) -> str:  # type: ignore[override]
        return str(self._told("kind", StateProvider.kind))

    @property
    def passive(self) -> bool:  # type: ignore[override]
        return bool(self._told("passive", otherwise=False))

    @property
    def cheap(self) -> bool:  # type: ignore[override]
        return bool(self._told("cheap", otherwise=False))

    @property
    def per_rank(self) -> bool:  # type: ignore[override]
        return bool(self._told("per_rank", otherwise=False))

    @property
    def when_ranks_change(self) -> WhenRanksChange:  # type: ignore[override]
        told: WhenRanksChange = self._told("when_ranks_change", StateProvider.when_ranks_change)
        return told

    @property
    def mixed(self) -> bool:
        return bool(self._told("mixed", otherwise=False))

    @property
    def undecided(self) -> str:
        return str(self._told("undecided", ""))
