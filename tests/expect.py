"""Expect errors and warnings by kinds, fields and values, so that their words can change freely."""

from __future__ import annotations

import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

E = TypeVar("E", bound=BaseException)


@contextmanager
def raises(
    kind: type[E] | tuple[type[E], ...], *values: object, **fields: object
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of a kind whose message names all values and whose fields hold what is given.

    `where="run/x"` wants that text in `error.where`; `transient=True` wants just that;
    `remedy=True` wants any remedy, and `found=None` no `found`.
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    for value in values:
        assert str(value) in str(error), (value, error)
    for name, wanted in fields.items():
        held = getattr(error, name)
        if isinstance(held, bool) or wanted is None:
            assert held is wanted, (name, held, error)
        elif wanted is True:
            assert held, (name, error)
        else:
            assert str(wanted) in str(held), (name, held, error)


def warned(caplog: pytest.LogCaptureFixture, *values: object) -> list[str]:
    """Return the warnings and errors of laststep's loggers that name all of these values."""
    texts = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.partition(".")[0] == "laststep"
    ]
    return [text for text in texts if all(str(value) in text for value in values)]


def names(text: str, *values: object) -> bool:
    """Return whether a text names these values, in this order."""
    pattern = ".*".join(re.escape(str(value)) for value in values)
    return re.search(pattern, text, re.DOTALL) is not None
