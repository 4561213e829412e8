"""Carry a stored checkpoint into memory: fit, read, verify, copy, hand over.

Everything that can be known to not fit is found, for all items together, before a single live byte
is touched.
"""

from __future__ import annotations

import fnmatch
import logging
from typing import TYPE_CHECKING

from laststep.checkpointer.parts import naming
from laststep.engine.copy.place import Placer
from laststep.engine.read import ReadFile, read_all
from laststep.errors import Mismatch, NotFound, Problems
from laststep.plan.load import Read, Want, plan_reads
from laststep.state.matching import Match, load_item, match_item
from laststep.state.modules import loads_in_its_own_way
from laststep.state.tensors import collect, copy_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from laststep.catalog.content import Content
    from laststep.engine.pool import Pool
    from laststep.state.provider import StateProvider

log = logging.getLogger(__name__)

VALUE = "state"
"""The item that holds a one-off state."""
_VALUES = frozenset({"value", "group"})
"""Kinds of items that are restored into the live dicts themselves."""


def selection(only: Sequence[str] | None, item: str) -> tuple[bool, Callable[[str], bool] | None]:
    """Whether an item takes part in a restore, and which of its tensors (None: all of it)."""
    if only is None or item in only:
        return True, None
    patterns = [p for p in only if fnmatch.fnmatchcase(item, p.split("/", 1)[0])]
    if not patterns:
        return False, None
    return True, lambda name: any(_matches(pattern, item, name) for pattern in patterns)


def _matches(pattern: str, item: str, name: str) -> bool:
    """Whether a glob picks a tensor; one without a slash picks whole items."""
    return "/" not in pattern or fnmatch.fnmatchcase(f"{item}/{name}", pattern)


def fit(
    content: Content,
    providers: Mapping[str, StateProvider],
    only: Sequence[str] | None,
    *,
    strict: bool,
    where: str,
    remedy: str,
) -> tuple[list[Match], Problems]:
    """Fit all wanted items; raises one `Mismatch` that lists everything when `strict`. `where` (the
    checkpoint's folder) and `remedy` are for its message."""
    matches: list[Match] = []
    missing, unexpected, mismatched = [], [], []
    removed: dict[str, list[str]] = {}
    for name, provider in providers.items():
        wanted, selected = selection(only, name)
        if not wanted:
            continue
        if name not in content.items:
            missing.append(name)
            continue
        item = content.item(name)
        if selected is not None and not any(map(selected, item.names())):
            continue
        with naming(name):
            state = provider.describe()
            live = collect(state.value, volatile=state.volatile, allow_pickle=True)
        match = match_item(item, provider, state, live, selected)
        match.exact = strict and selected is None
        if () not in match.foreign:
            matches.append(match)
        missing += [f"{name}/{n}" for n in match.missing]
        unexpected += [f"{name}/{n}" for n in match.unexpected]
        mismatched += [
            f"{name}/{text}" if "/" in text or ":" in text else f"{name} {text}"
            for text in match.mismatched
        ]
        newer = match.newer_values() if match.whole else []
        if not strict:
            missing += [f"{name}/{n}" for n in newer]
        elif newer and provider.kind in _VALUES:
            removed[name] = newer
    if only is None:
        unexpected += [name for name in content.items if name not in providers]
    else:
        _check_all_used(only, content, providers, where)
    problems = Problems(
        missing=tuple(missing), unexpected=tuple(unexpected), mismatched=tuple(mismatched)
    )
    if problems and strict:
        remedy += _way_by_hooks(problems, content, providers, where)
        raise Mismatch.of(problems, where=where, remedy=remedy)
    _warn_of_removed(removed)
    return matches, problems


def _way_by_hooks(
    problems: Problems, content: Content, providers: Mapping[str, StateProvider], where: str
) -> str:
    """The way out for modules that translate the names of older checkpoints when they load: tensors
    that are restored in place do not pass through their hooks."""
    named = {text.partition("/")[0] for text in (*problems.missing, *problems.unexpected)}
    for name in sorted(named.intersection(providers)):
        if any(loads_in_its_own_way(part) for part in providers[name].parts()):
            stored = f"laststep.load({where!r})"
            if set(content.items) != {VALUE}:
                stored += f"[{name!r}]"
            return (
                f"; {name} has hooks for loading, which a restore in place does not run: "
                f"its load_state_dict({stored}) does"
            )
    return ""


def _warn_of_removed(removed: Mapping[str, Sequence[str]]) -> None:
    for item, names in removed.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        log.warning(
            "%s goes back to what was saved, without %s%s; strict=False would keep them",
            item, ", ".join(names[:3]), more,
        )  # fmt: skip


def _check_all_used(
    only: Sequence[str], content: Content, providers: Mapping[str, StateProvider], where: str
) -> None:
    """`NotFound` for a part that was asked for and picks nothing, such as a misspelt one."""
    names = {name: content.items[name].names() for name in providers if name in content.items}
    items = f"items {', '.join(sorted(content.items))} in the checkpoint"
    for pattern in only:
        whose = pattern.split("/", 1)[0]
        if pattern in providers or any(
            pattern == item
            or (fnmatch.fnmatchcase(item, whose)
                and any(_matches(pattern, item, name) for name in tensors))
            for item, tensors in names.items()
        ):  # fmt: skip
            continue
        if not any(fnmatch.fnmatchcase(item, whose) for item in providers):
            raise NotFound(
                "no live item of this Checkpointer matches",
                where=where,
                expected=pattern,
                found=f"live items {', '.join(sorted(providers))}, and {items}",
                remedy=f"pass {whose}=… to the Checkpointer to restore it"
                if whose in content.items
                else "name one of the live items",
            )
        raise NotFound(
            "nothing in the checkpoint matches", where=where, expected=pattern, found=items,
            remedy="`laststep show --all` lists the names",
        )  # fmt: skip


def load_all(content: Content, device: str) -> list[Match]:
    """All items into new memory."""
    return [load_item(item, device) for item in content.items.values()]


def transfer(content: Content, matches: Sequence[Match], pool: Pool, *, threads: int) -> int:
    """Read what the matches want, each block once, into place; returns the bytes read."""
    targets: list[torch.Tensor] = []
    wants: dict[int, list[Want]] = {}
    for match in matches:
        for source, tensor in match.reads.items():
            place = content.places[match.item.name, source]
            wants.setdefault(place.file, []).append(
                Want(place.entry.start, place.entry.stop, len(targets))
            )
            targets.append(tensor)
    reads: list[Read] = []
    for number, wanted in wants.items():
        reads += plan_reads(number, content.files[number].header.tensor_bytes, wanted)
    files = [
        ReadFile(
            reader=f.reader, data_at=f.record.header_bytes, blocks=f.header.blocks, where=f.where
        )
        for f in content.files
    ]
    placer = Placer(pool, targets)
    done = read_all(files, reads, pool, placer.deliver, threads=threads)
    placer.finish()
    copy_tensors([pair for match in matches for pair in match.copies])
    return done
