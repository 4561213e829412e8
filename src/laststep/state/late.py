"""An item that does not exist yet when the Checkpointer is made, as frameworks make theirs late.

Until it is made it has no parts and says nothing of itself; whoever describes or restores it makes
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laststep.checks import shown
from laststep.errors import Usage
from laststep.state.provider import AroundProvider, StateProvider

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.state.provider import WhenRanksChange


class Late(AroundProvider):
    """Names an item that is made later: `Late(lambda: trainer.optimizer)`. The function is called
    at the first save or restore that needs the item, and gives None while there is none."""

    def __init__(self, make: Callable[[], object]) -> None:
        if not callable(make):
            raise Usage(
                "a late item is not a function", expected="a function that gives the item",
                found=shown(make), remedy="pass Late(lambda: item), or the item itself",
            )  # fmt: skip
        self._make = make
        self._thing: object = None
        self._source = self
        self._provide: Callable[[object], StateProvider] | None = None
        self._made: StateProvider | None = None

    def around(self, provide: Callable[[object], StateProvider]) -> Late:
        """One for a Checkpointer, that makes its provider so. The thing is made once."""
        made = Late(self._make)
        made._source, made._provide = self, provide
        return made

    def thing(self) -> object:
        """What there is by now; None where that is nothing."""
        if self._source._thing is None:
            self._source._thing = self._make()
        return self._source._thing

    @property
    def is_made(self) -> bool:
        return self._made is not None

    @property
    def _inner(self) -> StateProvider:  # type: ignore[override]
        if self._made is None:
            thing = self.thing()
            if thing is None or self._provide is None:
                raise Usage(
                    "a late item does not exist yet", expected="what its function gives",
                    found="None", remedy="save and restore it once it is made, or leave it out: "
                    "restore(only=[…])",
                )  # fmt: skip
            self._made = self._provide(thing)
        return self._made

    def parts(self) -> tuple[object, ...]:
        return () if self._made is None else self._made.parts()

    def _told(self, name: str, otherwise: Any) -> Any:
        return otherwise if self._made is None else getattr(self._made, name, otherwise)

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
