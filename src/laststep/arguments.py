"""Check and normalise the arguments that users pass to a Checkpointer.

This module does not know what the arguments do. It raises `UsageError` for anything that cannot
work, before any work starts.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import filter as matching
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, SupportsIndex

from msgspec import Meta, structs

from laststep import settings
from laststep.catalog.retention import Keep
from laststep.checks import checked, did_you_mean, plain, shown
from laststep.codecs.blocks import codec_named
from laststep.constants import with_article
from laststep.errors import UsageError
from laststep.flush.rounding import ROUNDINGS
from laststep.settings import ALL_ITEMS, OWN_KEYWORDS, Compression, Options, Preemption

if TYPE_CHECKING:
    import torch

    from laststep.tiers.tier import Tier

log = logging.getLogger(__name__)

_Step = Annotated[int, Meta(ge=0, le=(1 << 62) - 1)]
_Patterns = Annotated[
    tuple[str, ...],
    Meta(min_length=1, description="names of items, or globs over item/tensor names"),
]


_CONTAINERS = ("lossy", "subscribers")
"""The settings of Options that take a dict or a list, as items do."""


def _expect(name: str, value: object, kind: type, remedy: str) -> None:
    if not isinstance(value, kind):
        raise UsageError(
            f"invalid value of {name}",
            expected=with_article(kind),
            found=f"{shown(value)}, {with_article(type(value))}",
            remedy=remedy,
        )


def plain_step(step: SupportsIndex) -> int:
    """Return a step as an int. Tensors are refused: int() of one synchronises the device, so the
    user should call it explicitly."""
    remedy = "count the steps of the training from 0; pass int(step) for a tensor or a text"
    number: int = checked("step", step, _Step, remedy=remedy)
    return number


class SaveRequest(NamedTuple):
    step: int
    metrics: Mapping[str, object]
    metadata: object
    overwrite: bool
    streams: Sequence[torch.cuda.Stream]


def save_request(
    step: SupportsIndex,
    metrics: Mapping[str, object] | None,
    metadata: object,
    overwrite: object,
    streams: Sequence[torch.cuda.Stream],
) -> SaveRequest:
    number = plain_step(step)
    metrics = {} if metrics is None else metrics
    _expect("metrics", metrics, Mapping, "pass metrics={'loss': loss}")
    _expect("streams", streams, Sequence, "pass streams=[stream]")
    for stream in streams:
        if not hasattr(stream, "cuda_stream"):
            raise UsageError(
                "invalid value of streams",
                expected="a sequence of torch.cuda.Stream",
                found=shown(streams),
                remedy="pass streams=[stream]",
            )
    return SaveRequest(number, metrics, metadata, true_or_false("overwrite", overwrite), streams)


def all_items(
    unnamed: Sequence[object], items: Mapping[str, object] | None, more_items: Mapping[str, object]
) -> dict[str, object]:
    """Merge the items of `items={…}` and of the keywords."""
    if unnamed:
        raise UsageError(
            "only the run may be passed without a name",
            expected="every part of the state by a name",
            found=f"{with_article(type(unnamed[0]))} without one",
            remedy="pass Checkpointer(run, model=model, optimizer=optimizer, …)",
        )
    named = {} if items is None else items
    _expect("items", named, Mapping, "pass items={'model': model, …}")
    twice = sorted(named.keys() & more_items.keys())
    if twice:
        raise UsageError(
            "duplicate item name",
            expected="each name once, in items={…} or as a keyword",
            found=f"{', '.join(twice)} in both",
            remedy="rename one, or leave one out",
        )
    for name, value in more_items.items():
        _refuse_setting(name, value)
    return {**named, **more_items}


def _refuse_setting(name: str, value: object) -> None:
    """Raise `UsageError` for a keyword that is a setting of `Options`, or misspells a setting."""
    rare = Options.__struct_fields__
    # A value that can be an item is one, even if its name is a setting: progress={"epoch": 0}.
    kinds = str | int | float | FunctionType | BuiltinFunctionType | Keep | Options
    is_option = name in _CONTAINERS or (name in rare and value is None)
    if not is_option and not isinstance(value, kinds):
        return
    known = (*OWN_KEYWORDS, *rare)
    meant = next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.75)), None)
    remedy = f"pass a dict if it is an item, {name}={{'value': …}}; else leave it out"
    if meant in rare:
        remedy = f"pass options=laststep.Options({meant}=…), or an item as items={{{name!r}: …}}"
    elif meant is not None:
        remedy = f"did you mean {meant}=…?"
    raise UsageError(
        f"{name!r} is a setting of Options" if name in rare else f"{name!r} is no keyword",
        expected=f"an item, or one of {', '.join(OWN_KEYWORDS)}" if meant is None else "an item",
        found=f"{name}={shown(value)}, {with_article(type(value))}",
        remedy=remedy,
    )


def true_or_false(name: str, value: object) -> bool:
    return value if isinstance(value, bool) else bool(checked(name, value, bool))


def all_settings(options: object, items: Iterable[str], **own: object) -> settings.Settings:
    """Return a Checkpointer's own settings and those of `options`, checked, for these items."""
    rare = Options() if options is None else options
    remedy = "pass options=laststep.Options(flush='thread'), or an item as items={'options': …}"
    _expect("options", rare, Options, remedy)
    made = settings.Settings(**structs.asdict(rare), **own)  # type: ignore[arg-type]
    modes, names = made.compression, [*items, ALL_ITEMS]
    words = {modes} if isinstance(modes, str) else {*modes.values()}
    for item in () if isinstance(modes, str) else modes:
        if item not in names:
            raise _unknown("compression names an unknown item", item, names)
    for pattern, word in (made.lossy or {}).items():
        if word not in ROUNDINGS:
            raise _unknown(f"lossy cannot round {pattern!r} to that", word, ROUNDINGS)
        if not matching(names, pattern.partition("/")[0]):
            raise _unknown("lossy names an unknown item; a pattern is item/tensor", pattern, names)
    if made.lossy or words != {Compression.NONE}:
        try:
            codec_named("planes")  # without which rounded tensors become no smaller either
        except UsageError as error:
            if made.lossy or words - {Compression.NONE, Compression.ADAPTIVE}:
                raise
            log.warning("compression='adaptive' stores everything as it is: %s", error)
    return made


_CHECKED_EARLY = ("every", "compression", "allow_pickle", "new_lineage", "host_memory_bytes")


def check_early(keywords: Mapping[str, Any]) -> None:
    """Raise the errors that a Checkpointer with these keywords would raise. For adapters that make
    it later, and do not know all of its items yet."""
    all_items(
        (), keywords.get("items"), {k: v for k, v in keywords.items() if k not in OWN_KEYWORDS}
    )
    rules(keywords.get("keep"))
    preemption(keywords.get("preemption"))
    own = {k: keywords.get(k, getattr(settings.DEFAULTS, k)) for k in _CHECKED_EARLY}
    modes, options = own["compression"], keywords.get("options")
    named = list(modes) if isinstance(modes, Mapping) else []
    if isinstance(options, Options):
        named += [pattern.partition("/")[0] for pattern in options.lossy or {}]
    all_settings(options, named, **own)


def _unknown(what: str, found: str, known: Iterable[str]) -> UsageError:
    expected = f"one of {', '.join(known)}"
    return UsageError(what, expected=expected, found=repr(found), remedy=did_you_mean(found, known))


def patterns(only: object) -> tuple[str, ...] | None:
    if only is None:
        return None
    given = [only] if isinstance(only, str) else only
    found: tuple[str, ...] = checked(
        "only",
        [plain(name) for name in given] if isinstance(given, Iterable) else given,
        _Patterns,
        remedy="pass only=['model'] or only=['optimizer/*exp_avg*']; without only all of it",
    )
    return found


def check_tiers(tiers: Sequence[Tier], items: Iterable[str]) -> None:
    """Raise `UsageError` if a tier names an unknown item."""
    names = [*items]
    for tier in tiers:
        for item in tier.items or ():
            if item not in names:
                raise _unknown(f"the tier {tier.url} names an unknown item", item, names)


def preemption(asked: object) -> Preemption | None:
    if isinstance(asked, Preemption) or asked is None:
        return asked
    remedy = "pass preemption=True, or preemption=laststep.Preemption(grace='60 s')"
    return Preemption() if checked("preemption", asked, bool, remedy=remedy) else None


def rules(keep: Keep | None) -> Keep | None:
    if keep is not None:
        _expect("keep", keep, Keep, "pass keep=laststep.Keep(last=3)")
    return keep
