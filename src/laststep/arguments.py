"""Check and normalise the arguments that users pass to a Checkpointer.

This module does not know what the arguments do. It raises `UsageError` for anything that cannot
work, before any work starts.
"""

from __future__ import annotations

import difflib
import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, SupportsIndex

from msgspec import Meta, structs

from laststep.catalog.retention import Keep
from laststep.checks import checked, did_you_mean, plain, shown
from laststep.codecs.blocks import codec_named
from laststep.constants import with_article
from laststep.errors import UsageError
from laststep.flush.encoder import ROUNDERS
from laststep.settings import (
    ALL_ITEMS,
    OWN_KEYWORDS,
    Compression,
    Options,
    Preemption,
    Settings,
    Words,
)
from laststep.state.tensors import is_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from laststep.tiers.tier import Tier

log = logging.getLogger(__name__)

MAX_STEP = (1 << 62) - 1
_RETENTION = Keep.__struct_fields__
"""The fields of Keep; users sometimes pass them as settings, such as `keep_last=3`."""


def plain_step(step: SupportsIndex) -> int:
    """Return a step as an int. Accepts NumPy integers; raises `UsageError` for bools, floats and
    tensors."""
    if is_tensor(step):
        # int() of a device tensor synchronises the device, so the user should call it explicitly.
        raise UsageError(
            "step is a tensor",
            expected="an int of 0 or more",
            found=f"a tensor of {step.dtype} on {step.device}",  # type: ignore[attr-defined]
            remedy="pass step=int(step)",
        )
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise UsageError(
            "invalid step",
            expected=f"an int from 0 to {MAX_STEP}",
            found=shown(step),
            remedy="count the steps of the training from 0",
        )
    return number


class SaveRequest(NamedTuple):
    """The checked arguments of a call of `save()`."""

    step: int
    metrics: Mapping[str, object]
    metadata: object
    overwrite: bool
    streams: Sequence[torch.cuda.Stream]


def save_request(
    step: SupportsIndex, metrics: object, metadata: object, overwrite: object, streams: object
) -> SaveRequest:
    number = plain_step(step)
    if metrics is None:
        metrics = {}
    if not isinstance(metrics, Mapping):
        raise UsageError(
            "metrics is not a mapping",
            expected="names and numbers",
            found=with_article(type(metrics)),
            remedy="pass metrics={'loss': loss}",
        )
    overwrites = true_or_false("overwrite", overwrite)
    if streams != ():
        streams = _all_of(
            streams,
            lambda one: hasattr(one, "cuda_stream"),
            "invalid value of streams",
            expected="a sequence of torch.cuda.Stream",
            remedy="pass streams=[stream]",
        )
    return SaveRequest(number, metrics, metadata, overwrites, streams)


def refuse_unnamed(values: tuple[object, ...]) -> None:
    """Raise `UsageError` for positional arguments after the run: items and settings need a name."""
    if values:
        first = type(values[0])
        name = first.__name__.lower()
        modules = {kind.__module__ for kind in first.__mro__}
        if "torch.nn.modules.module" in modules:
            name = "model"
        elif "torch.optim.optimizer" in modules:
            name = "optimizer"
        raise UsageError(
            "only the run may be passed without a name",
            expected="every part of the state by a name",
            found=f"{with_article(first)} without one",
            remedy=f"pass Checkpointer(run, {name}=…)",
        )


def all_items(items: object, more_items: Mapping[str, object]) -> dict[str, object]:
    """Merge the items of `items={…}` and of the keywords."""
    if items is not None and not isinstance(items, Mapping):
        raise UsageError(
            "items is not a mapping",
            expected="a mapping of names to items",
            found=with_article(type(items)),
            remedy="pass items={'model': model, …}",
        )
    twice = sorted(set(items or {}) & set(more_items))
    if twice:
        raise UsageError(
            "duplicate item name",
            expected="each name once, in items={…} or as a keyword",
            found=f"{', '.join(twice)} in both",
            remedy="rename one, or leave one out",
        )
    for name, value in more_items.items():
        _refuse_misspelt(name, value)
    return {**(items or {}), **more_items}


def _refuse_misspelt(name: str, value: object) -> None:
    """Raise `UsageError` for a keyword that is a setting of `Options`, or a misspelt setting."""
    if name in Options.__struct_fields__:
        raise UsageError(
            f"{name} is a setting of laststep.Options",
            expected=f"an item, or one of {', '.join(OWN_KEYWORDS)}",
            found=f"{name}={shown(value)}",
            remedy=(
                f"pass options=laststep.Options({name}={shown(value)}); "
                f"pass an item of that name as items={{{name!r}: …}}"
            ),
        )
    # A value that can be an item is one, even if its name resembles a setting.
    if value is None or not isinstance(
        value, str | int | float | FunctionType | BuiltinFunctionType | Keep | Options
    ):
        return
    every = (*OWN_KEYWORDS, *Options.__struct_fields__)
    meant = next(iter(difflib.get_close_matches(name, every, n=1, cutoff=0.75)), None)
    rule = name.removeprefix("keep_")
    if isinstance(value, Keep | Options):
        remedy = f"did you mean {type(value).__name__.lower()}=…?"
    elif rule in _RETENTION and name != rule:
        remedy = f"did you mean keep=laststep.Keep({rule}={shown(value)})?"
    elif meant in OWN_KEYWORDS:
        remedy = f"did you mean {meant}={shown(value)}?"
    elif meant is not None:
        given = f"[{name}]" if meant == "subscribers" else shown(value)
        remedy = f"did you mean options=laststep.Options({meant}={given})?"
    else:
        remedy = f"pass a dict if it is an item, {name}={{'value': …}}; else leave it out"
    raise UsageError(
        f"unknown setting {name!r}",
        expected=f"an item, or one of {', '.join(every)}",
        found=f"{name}={shown(value)}: a keyword that is not a setting is an item, "
        f"and {with_article(type(value))} cannot be restored in place",
        remedy=remedy,
    )


def true_or_false(name: str, value: object) -> bool:
    """Return a bool; raise `UsageError` for anything else, numbers and strings included."""
    if isinstance(value, bool):
        return value
    return bool(checked(name, value, bool))


def all_settings(options: object, items: Iterable[str], **own: object) -> Settings:
    """Return a Checkpointer's own settings and those of `options`, checked, for these items."""
    if options is not None and type(options) is not Options:
        raise UsageError(
            "options is not an Options",
            expected="laststep.Options(…)",
            found=shown(options),
            remedy=(
                "pass laststep.Options(…), such as options=laststep.Options(flush='thread'); "
                "pass an item of that name as items={'options': …}"
            ),
        )
    rare = options or Options()
    modes = compression(own.pop("compression"), items)
    _check_rounding(rare.lossy or {}, items)
    return Settings(**structs.asdict(rare), **own, compression=modes)  # type: ignore[arg-type]


_CompressionModes = Annotated[
    str | Words,
    Meta(description="a word such as 'adaptive', or a word for each item, {'optimizer': 'max'}"),
]


def compression(asked: object, items: Iterable[str]) -> str | dict[str, str]:
    """Return the compression per item, or for all items."""
    modes: str | dict[str, str] = checked(
        "compression", asked, _CompressionModes, remedy="see docs/guides/smaller.md"
    )
    names = [*items, ALL_ITEMS]
    for item, word in {ALL_ITEMS: modes}.items() if isinstance(modes, str) else modes.items():
        if item not in names:
            raise _unknown(f"compression names an unknown item: {item!r}", item, names)
        _check_mode(word)
    return modes


def _check_rounding(rounded: Mapping[str, str], items: Iterable[str]) -> None:
    names = [*items, ALL_ITEMS]
    for pattern, word in rounded.items():
        if word not in ROUNDERS:
            raise _unknown(f"{pattern} cannot be rounded to that", word, list(ROUNDERS))
        whose = pattern.partition("/")[0]
        if not any(fnmatchcase(item, whose) for item in names):
            raise _unknown(
                f"lossy={{{pattern!r}: …}} names no item: a pattern is item/tensor, as in "
                "'optimizer/*exp_avg' or '*/*exp_avg'",
                whose,
                names,
            )
        codec_named("planes")  # rounded tensors need this codec to become smaller


def _check_mode(word: str) -> None:
    if word not in {*Compression}:
        raise _unknown("unknown compression", word, list(Compression))
    if word == Compression.NONE:
        return
    try:
        codec_named("planes")
    except UsageError as error:
        if word != Compression.ADAPTIVE:
            raise
        log.warning("compression='adaptive' stores everything as it is: %s", error)


def _unknown(what: str, found: str, known: Sequence[str], guide: str = "smaller") -> UsageError:
    remedy = did_you_mean(found, known, f"see docs/guides/{guide}.md")
    expected = f"one of {', '.join(known)}"
    return UsageError(what, expected=expected, found=repr(found), remedy=remedy)


def patterns(only: object) -> tuple[str, ...] | None:
    if only is None:
        return None
    names = _all_of(
        (only,) if isinstance(only, str) else only,
        lambda one: isinstance(one, str),
        "invalid value of only",
        at_least=1,
        expected="names of items, or globs over item/tensor names",
        remedy="pass only=['model'] or only=['optimizer/*exp_avg*']; without only all of it",
    )
    return tuple(map(plain, names))  # type: ignore[arg-type]


def _all_of(
    value: object,
    is_one: Callable[[object], bool],
    refusal: str,
    *,
    expected: str,
    remedy: str,
    at_least: int = 0,
) -> tuple[Any, ...]:
    """Return the value as a tuple; raise `UsageError` unless every element passes `is_one`."""
    given = tuple(value) if isinstance(value, Iterable) else None
    if given is None or len(given) < at_least or not all(map(is_one, given)):
        raise UsageError(refusal, expected=expected, found=shown(value), remedy=remedy)
    return given


def check_tiers(tiers: Sequence[Tier], items: Iterable[str]) -> None:
    """Raise `UsageError` if a tier names an unknown item."""
    names = [*items]
    for tier in tiers:
        for item in tier.items or ():
            if item not in names:
                what = f"the tier {tier.url} names an unknown item: {item!r}"
                raise _unknown(what, item, names, "tiers")


def preemption(asked: object) -> Preemption | None:
    if isinstance(asked, Preemption) or asked is None:
        return asked
    remedy = "pass preemption=True, or preemption=laststep.Preemption(grace='60 s')"
    return Preemption() if checked("preemption", asked, bool, remedy=remedy) else None


def rules(keep: Keep | None) -> Keep | None:
    if keep is not None and not isinstance(keep, Keep):
        raise UsageError(
            "keep must be a laststep.Keep",
            found=shown(keep),
            remedy="pass keep=laststep.Keep(last=3)",
        )
    return keep
