"""Check what a user passes to a Checkpointer, and bring it into one form.

Knows nothing of what the arguments do. Whatever cannot work is `Usage`, before anything is begun.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from typing import SupportsIndex

from laststep.errors import Usage
from laststep.state.tensors import is_tensor


def plain_step(step: SupportsIndex) -> int:
    """A step as an int; NumPy's integers are welcome, booleans, floats and tensors are not."""
    if is_tensor(step):
        # int() of a tensor on a device waits for all work there: the user should see that.
        raise Usage(
            "a step is a number, not a tensor", expected="an int of 0 or more",
            found=f"a tensor of {step.dtype} on {step.device}",  # type: ignore[attr-defined]
            remedy="pass step=int(step)",
        )  # fmt: skip
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise Usage(
            "a step is a number", expected="an int of 0 or more", found=repr(step),
            remedy="count the steps of the training from 0",
        )  # fmt: skip
    return number


def run_path(run: object) -> str:
    """The path of a run as text."""
    path = os.fspath(run) if isinstance(run, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise Usage(
            "a run is the path of a folder", expected="a str or an os.PathLike", found=repr(run),
            remedy='pass a path, such as "runs/first"',
        )  # fmt: skip
    return path


def all_items(items: object, more_items: Mapping[str, object]) -> dict[str, object]:
    """The items of both ways to name them."""
    if items is not None and not isinstance(items, Mapping):
        raise Usage(
            "items is not a mapping", expected="names and what they stand for",
            found=f"a {type(items).__name__}", remedy="pass items={'model': model, …}",
        )  # fmt: skip
    return {**(items or {}), **more_items}


def check_metrics(metrics: object) -> None:
    """Metrics have names."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise Usage(
            "metrics is not a mapping", expected="names and numbers",
            found=f"a {type(metrics).__name__}", remedy="pass metrics={'loss': loss}",
        )  # fmt: skip


def patterns(only: object) -> tuple[str, ...] | None:
    """What to restore as patterns; a single one may stand for itself."""
    if only is None:
        return None
    given = (only,) if isinstance(only, str) or not isinstance(only, Iterable) else tuple(only)
    found = tuple(pattern for pattern in given if isinstance(pattern, str))
    if len(found) != len(given):
        raise Usage(
            "only does not name parts of the state",
            expected="names of items, or globs over item/tensor names", found=repr(only),
            remedy="pass only=['model'] or only=['optimizer/*exp_avg*']",
        )  # fmt: skip
    return found
