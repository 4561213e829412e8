"""Check what a user passes to a Checkpointer, and bring it into one form.

Knows nothing of what the arguments do. Whatever cannot work is `UsageError`, before anything is
begun."""

from __future__ import annotations

import difflib
import logging
import operator
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypedDict

from laststep.catalog.retention import Keep
from laststep.checks import checked, plain, shown
from laststep.codecs.blocks.registry import OURS, codec_named, is_known_everywhere
from laststep.errors import UsageError
from laststep.flush.encoder import ROUNDERS
from laststep.restoring.restore import RestoreRequest
from laststep.settings import ALL_ITEMS, Compression, Preemption, Settings
from laststep.state.tensors import is_tensor
from laststep.terms import with_article

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from laststep.events import Subscriber
    from laststep.tiers.tier import Tier

log = logging.getLogger(__name__)

MAX_STEP = (1 << 62) - 1
SETTINGS = ("items", "keep", "tiers", *Settings.__struct_fields__, "preemption", "subscribers")
_RETENTION = Keep.__struct_fields__
"""The rules of Keep, which are asked for as settings: `keep_last=3`."""


def plain_step(step: SupportsIndex) -> int:
    """A step as an int; NumPy's integers are welcome, booleans, floats and tensors are not."""
    if is_tensor(step):
        # int() of a tensor on a device waits for all work there: the user should see that.
        raise UsageError(
            "a step is a whole number, not a tensor",
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
            "a step is a whole number",
            expected=f"an int from 0 to {MAX_STEP}",
            found=shown(step),
            remedy="count the steps of the training from 0",
        )
    return number


class SaveRequest(NamedTuple):
    """What a call of `save()` asks for, as a user passes it."""

    step: SupportsIndex
    metrics: Mapping[str, object] | None
    metadata: object
    overwrite: bool
    streams: Sequence[torch.cuda.Stream]

    def plain(self) -> tuple[int, SaveRequest]:
        """The step as an int, and all of it checked."""
        step = plain_step(self.step)
        check_metrics(self.metrics)
        overwrite = true_or_false("overwrite", self.overwrite)
        return step, self._replace(overwrite=overwrite, streams=cuda_streams(self.streams))


def refuse_unnamed(values: tuple[object, ...]) -> None:
    """Only the run goes without a name: items have one, and settings too."""
    if values:
        first = type(values[0])
        name = first.__name__.lower()
        if any(kind.__module__ == "torch.nn.modules.module" for kind in first.__mro__):
            name = "model"
        elif any(kind.__module__ == "torch.optim.optimizer" for kind in first.__mro__):
            name = "optimizer"
        raise UsageError(
            "only the run is passed without a name",
            expected="every part of the state by a name",
            found=f"{with_article(first)} without one",
            remedy=f"pass Checkpointer(run, {name}=…)",
        )


def all_items(items: object, more_items: Mapping[str, object]) -> dict[str, object]:
    """The items of both ways to name them."""
    if items is not None and not isinstance(items, Mapping):
        raise UsageError(
            "items is not a mapping",
            expected="names and what they stand for",
            found=with_article(type(items)),
            remedy="pass items={'model': model, …}",
        )
    twice = sorted(set(items or {}) & set(more_items))
    if twice:
        raise UsageError(
            "an item is named twice",
            expected="each name once, in items={…} or as a keyword",
            found=f"{', '.join(twice)} in both",
            remedy="rename one, or leave one out",
        )
    for name, value in more_items.items():
        _refuse_misspelt(name, value)
    return {**(items or {}), **more_items}


def _refuse_misspelt(name: str, value: object) -> None:
    """A setting that is not spelt as one would be taken for an item."""
    # Whatever can be an item is one, whatever it is called.
    if value is None or not isinstance(
        value, str | int | float | FunctionType | BuiltinFunctionType | Keep
    ):
        return
    meant = next(iter(difflib.get_close_matches(name, SETTINGS, n=1, cutoff=0.75)), None)
    rule = name.removeprefix("keep_")
    if isinstance(value, Keep):
        remedy = "did you mean keep=laststep.Keep(…)?"
    elif rule in _RETENTION and name != rule:
        remedy = f"did you mean keep=laststep.Keep({rule}={shown(value)})?"
    elif meant == "subscribers":
        remedy = f"did you mean subscribers=[{name}]?"
    elif meant is not None:
        remedy = f"did you mean {meant}={shown(value)}?"
    else:
        remedy = f"pass a dict if it is an item, {name}={{'value': …}}; else leave it out"
    raise UsageError(
        f"{name} is no setting",
        expected=f"an item, or one of {', '.join(SETTINGS)}",
        found=f"{name}={shown(value)}: keywords that are no settings are items of the state, and "
        f"{with_article(type(value))} cannot be restored in place",
        remedy=remedy,
    )


def true_or_false(name: str, value: object) -> bool:
    """A bool; numbers and text are none."""
    return bool(checked(name, value, bool))


def cuda_streams(streams: object) -> tuple[torch.cuda.Stream, ...]:
    """Streams on which state was written."""
    return _all_of(
        streams,
        lambda one: hasattr(one, "cuda_stream"),
        "streams does not name CUDA streams",
        expected="a sequence of torch.cuda.Stream",
        remedy="pass streams=[stream]",
    )


def callables(subscribers: object) -> tuple[Subscriber, ...]:
    """Who is told of events."""
    return _all_of(
        subscribers,
        callable,
        "subscribers is not a sequence of functions",
        expected="functions that take an event",
        remedy="pass subscribers=[on_event]",
    )


class CodingSettings(TypedDict):
    """What settings say of how blocks are encoded."""

    compression: str | dict[str, str]
    lossy: dict[str, str] | None


def derived(asked: object) -> bool | dict[str, str]:
    """What follows from what, in a form of its own."""
    pairs: Any = dict(asked) if isinstance(asked, Mapping) else asked
    if not isinstance(pairs, bool) and not _are_words(pairs):
        raise UsageError(
            "derived is not understood",
            found=shown(asked),
            expected="True, False, or names of tensors and those of their masters",
            remedy="pass derived=True, or derived={'model/*': 'optimizer/state/*/master'}",
        )
    for name, master in pairs.items() if isinstance(pairs, dict) else ():
        if name.count("*") != master.count("*"):
            raise UsageError(
                "derived maps names of tensors to those of their masters",
                expected="as many '*' on both sides",
                found=f"{name!r}: {master!r}",
                remedy="derived={'model/*': 'optimizer/state/*/master'}, or derived=True",
            )
    return pairs  # type: ignore[no-any-return]


def coding(
    compression: object, lossy: object, items: Iterable[str], *, here: bool
) -> CodingSettings:
    """Words that mean something, for items that there are; codecs that can be had where blocks are
    encoded, in this process or in another, and give back what they were given."""
    modes: Any = dict(compression) if isinstance(compression, Mapping) else compression
    rounded: Any = dict(lossy) if isinstance(lossy, Mapping) else {} if lossy is None else lossy
    if not isinstance(modes, str) and not _are_words(modes):
        raise UsageError(
            "compression is not understood",
            expected="a word such as 'adaptive', or a word for each item, {'optimizer': 'max'}",
            found=shown(compression),
            remedy="see docs/guides/smaller.md",
        )
    if not _are_words(rounded):
        raise UsageError(
            "lossy is not understood",
            found=shown(lossy),
            expected="patterns of tensors and what they are rounded to",
            remedy="pass lossy={'optimizer/*exp_avg': 'int8'}, or leave it out",
        )
    modes = plain(modes) if isinstance(modes, str) else modes
    names = [*items, ALL_ITEMS]
    for item, word in {ALL_ITEMS: modes}.items() if isinstance(modes, str) else modes.items():
        if item not in names:
            raise _unknown(f"compression names {item!r}, which is no item", item, names)
        _check_mode(word, here=here)
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
        codec_named("planes")  # which makes something of it
    return {"compression": modes, "lossy": rounded or None}


def _are_words(value: object) -> bool:
    """Whether it is a dict of texts."""
    return isinstance(value, dict) and all(
        isinstance(text, str) and text for pair in value.items() for text in pair
    )


def _check_mode(word: str, *, here: bool) -> None:
    if word == Compression.NONE:
        return
    if word == Compression.ADAPTIVE:
        try:
            codec_named("planes")
        except UsageError as error:
            log.warning("compression='adaptive' stores everything as it is: %s", error)
        return
    name = "planes" if word == Compression.MAX else word
    try:
        codec = codec_named(name)
    except UsageError as error:
        if name == word and word not in OURS:
            words = [*Compression, *sorted(OURS)]
            raise _unknown("there is no such compression, nor a codec", word, words) from error
        raise
    if not here and not is_known_everywhere(name):
        raise UsageError(
            "the flusher, a process of its own, does not know this codec",
            found=repr(name),
            expected="one that a package brings by an entry point of 'laststep.codecs'",
            remedy="pass flush='thread' for one that is registered in this process only",
        )
    if not codec.lossless:
        raise UsageError(
            "compression does not change values",
            expected="a codec that is lossless",
            found=f"the codec {word!r}, which is not",
            remedy="lossy={…} rounds, and says so",
        )


def _unknown(what: str, found: str, known: Sequence[str], guide: str = "smaller") -> UsageError:
    near = difflib.get_close_matches(found.lower(), known, n=1)
    return UsageError(
        what,
        expected=f"one of {', '.join(known)}",
        found=repr(found),
        remedy=f"did you mean '{near[0]}'?" if near else f"see docs/guides/{guide}.md",
    )


def restore_request(
    step: SupportsIndex | None,
    only: object,
    settings: Settings,
    ranks_here: int,
    *,
    strict: object,
    exact: object,
    remote: bool,
    tiers: Sequence[Tier],
) -> RestoreRequest:
    """What restore() was asked for."""
    return RestoreRequest(
        step=None if step is None else plain_step(step),
        only=patterns(only),
        strict=true_or_false("strict", strict),
        exact=true_or_false("exact", exact),
        allow_pickle=settings.allow_pickle,
        threads=settings.readers(ranks_here, remote=remote),
        tiers=tiers,
    )


def check_metrics(metrics: object) -> None:
    """Metrics have names."""
    if metrics is not None and not isinstance(metrics, Mapping):
        raise UsageError(
            "metrics is not a mapping",
            expected="names and numbers",
            found=with_article(type(metrics)),
            remedy="pass metrics={'loss': loss}",
        )


def patterns(only: object) -> tuple[str, ...] | None:
    """What to restore as patterns; a single one may stand for itself."""
    if only is None:
        return None
    names = _all_of(
        (only,) if isinstance(only, str) else only,
        lambda one: isinstance(one, str),
        "only does not name parts of the state",
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
    """A sequence of one kind of thing."""
    given = tuple(value) if isinstance(value, Iterable) else None
    if given is None or len(given) < at_least or not all(map(is_one, given)):
        raise UsageError(refusal, expected=expected, found=shown(value), remedy=remedy)
    return given


def excerpts(
    tiers: Sequence[Tier],
    items: Iterable[str],
    derived: bool | Mapping[str, str],  # noqa: FBT001
) -> list[tuple[str, ...]]:
    """The items of each tier that takes only some, which are items that there are. What is declared
    to follow from others goes nowhere without them."""
    names, found = [*items], []
    for tier in tiers:
        for item in tier.items or ():
            if item not in names:
                what = f"the tier {tier.url} takes {item!r}, which is no item"
                raise _unknown(what, item, names, "tiers")
        if tier.items is not None:
            _refuse_orphans(tier.url, tier.items, derived if isinstance(derived, Mapping) else {})
            found.append(tier.items)
    return found


def _refuse_orphans(url: str, items: tuple[str, ...], derived: Mapping[str, str]) -> None:
    for pattern, master in derived.items():
        low, high = (text.partition("/")[0] for text in (pattern, master))
        takes = [any(fnmatchcase(item, whose) for item in items) for whose in (low, high)]
        if takes == [True, False]:
            raise UsageError(
                "tensors are declared to follow from others that the tier does not take",
                where=url,
                expected=f"{master} among the items",
                found=f"items={items}",
                remedy=f"take {high!r} too, or pass derived=True: it stores what is to stand alone",
            )


def preemption(asked: object) -> Preemption | None:
    """What is done when the job is to end; None: nothing."""
    if isinstance(asked, Preemption) or asked is None:
        return asked
    remedy = "pass preemption=True, or preemption=laststep.Preemption(grace='60 s')"
    return Preemption() if checked("preemption", asked, bool, remedy=remedy) else None


def rules(keep: Keep | None) -> Keep | None:
    """The rules of retention."""
    if keep is not None and not isinstance(keep, Keep):
        raise UsageError(
            "keep is not a Keep", found=shown(keep), remedy="pass keep=laststep.Keep(last=3)"
        )
    return keep
