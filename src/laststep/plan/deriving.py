"""Find the tensors of a save that may be derived from others. The candidates are tried later.

Pure: only names, dtypes and shapes are examined, never values. A bf16 or fp16 tensor may be the
rounding of an fp32 master of the same shape; if ranks share the tensor, both must be the same part
of it. Pairs are declared by name patterns, or guessed from how states are usually built: an
optimizer keeps state for a parameter under its name, and copies in lists are in the order of their
originals.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from laststep.format.deriving import DERIVED_DTYPES, MASTER_DTYPE
from laststep.plan.files import MasterPair

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from laststep.format.layout import FileLayout
    from laststep.plan.files import SavePlan

log = logging.getLogger(__name__)

_MOST = 4
"""The most candidates per tensor. Each costs a rounding of the tensor's bytes until it is known to
be wrong."""
_HINTS = re.compile(r"master|fp32|param|main|copy|orig")
"""Words in the names of likely masters, which are tried first."""


_Box = tuple[tuple[int, ...], ...]


class _Tensor(NamedTuple):
    """A tensor, or a part of one, in a planned file."""

    name: str
    """The full name, `item/name`."""
    dtype: str
    box: _Box
    """The shape; for a part also the shape of the whole tensor and the start of the part."""
    file: int
    entry: int

    @property
    def item(self) -> str:
        return self.name.partition("/")[0]

    @property
    def path(self) -> str:
        """The name within the item."""
        return self.name.partition("/")[2]

    @property
    def series(self) -> str:
        """The name without list indices."""
        return re.sub(r"#\d+", "#", self.name)


def with_derived(
    plan: SavePlan,
    asked: bool | Mapping[str, str],  # noqa: FBT001
    *,
    is_all: bool = True,
    partial_tiers: Sequence[Collection[str]] = (),
) -> SavePlan:
    """Return the plan with pairs of tensors and possible masters.

    `asked` maps name patterns of tensors to those of their masters; True means to guess. Files with
    derived tensors are moved to the end, so that their masters arrive first. `is_all` is True
    if no other rank has a part of the save: a pattern that matches nothing here then matches
    nothing at all, which is logged. `partial_tiers` are the items of each partial replica; a tensor
    that is copied there is not derived from one that is not.
    """
    tensors = [
        tensor for number, file in enumerate(plan.files) for tensor in _of_file(number, file.layout)
    ]
    low = [tensor for tensor in tensors if tensor.dtype in DERIVED_DTYPES]
    masters = [tensor for tensor in tensors if tensor.dtype == MASTER_DTYPE]
    if isinstance(asked, Mapping):
        pairs = _declared(low, masters, asked, is_all=is_all)
    else:
        pairs = _found(low, masters)
    for items in partial_tiers:
        pairs = [(one, of) for one, of in pairs if one.item not in items or of.item in items]
    follows = {tensor.file for tensor, _ in pairs}
    order = sorted(range(len(plan.files)), key=lambda number: number in follows)
    number_of = {file: number for number, file in enumerate(order)}
    return structs.replace(
        plan,
        files=tuple(plan.files[number] for number in order),
        derived=tuple(
            MasterPair(number_of[one.file], one.entry, number_of[of.file], of.entry)
            for one, of in pairs
        ),
        is_declared=isinstance(asked, Mapping),
    )


def _of_file(number: int, file: FileLayout) -> Iterable[_Tensor]:
    outer = "" if file.item is None else f"{file.item}/"
    for entry, (name, dtype, shape, start, stop) in enumerate(file.tensors):
        part = file.parts.get(name)
        box = (shape,) if part is None else (shape, part.shape, part.start)
        if start < stop:
            whole = name if part is None else name[: name.rindex("~6at")]
            yield _Tensor(outer + whole, dtype, box, number, entry)


def _declared(
    low: list[_Tensor], masters: list[_Tensor], asked: Mapping[str, str], *, is_all: bool
) -> list[tuple[_Tensor, _Tensor]]:
    known = {(master.name, master.box): master for master in masters}
    pairs: list[tuple[_Tensor, _Tensor]] = []
    for pattern, target in asked.items():
        before, wanted = len(pairs), re.compile("(.*)".join(map(re.escape, pattern.split("*"))))
        for tensor in low:
            match = wanted.fullmatch(tensor.name)
            if match is not None:
                name = "".join(chain(*zip_longest(target.split("*"), match.groups(), fillvalue="")))
                master = known.get((name, tensor.box))
                pairs += [] if master is None else [(tensor, master)]
        if len(pairs) == before and is_all:
            log.warning("derived: no %s has a %s of fp32 and its shape so far", pattern, target)
    return list(dict.fromkeys(pairs))  # two patterns may match the same pair


def _found(low: list[_Tensor], masters: list[_Tensor]) -> list[tuple[_Tensor, _Tensor]]:
    keys = {tensor: _keys(tensor) for tensor in low}
    wanted = set(chain.from_iterable(keys.values()))
    by_key: dict[tuple[str, _Box], list[_Tensor]] = defaultdict(list)
    series: dict[tuple[str, _Box], list[_Tensor]] = defaultdict(list)
    for master in masters:
        for key in wanted.intersection((master.path, *master.path.split("/"))):
            by_key[key, master.box].append(master)
        if "#" in master.name:
            series[master.series, master.box].append(master)
    pairs: list[tuple[_Tensor, _Tensor]] = []
    unknown: dict[tuple[str, _Box], list[_Tensor]] = defaultdict(list)
    for tensor in low:
        found = [master for key in keys[tensor] for master in by_key[key, tensor.box]]
        found = sorted(dict.fromkeys(found), key=_is_unlikely)[:_MOST]
        pairs += [(tensor, master) for master in found]
        if not found:
            unknown[tensor.item, tensor.box].append(tensor)
    for (_, box), some in unknown.items():
        alike = [others for (_, of), others in series.items() if of == box]
        for others in sorted(alike, key=lambda others: _is_unlikely(others[0]))[:_MOST]:
            if len(others) == len(some):
                pairs += zip(some, others, strict=True)
    return pairs


def _keys(tensor: _Tensor) -> list[str]:
    """Return the strings that may stand for this tensor in the name of its master: its name or a
    suffix of its path, joined by `/` or, as modules name their parameters, by `.`."""
    item, *parts = tensor.name.split("/")
    ends = [parts[at:] for at in range(len(parts))]
    return [f"{item}:{'.'.join(parts)}", *("/".join(e) for e in ends), *(".".join(e) for e in ends)]


def _is_unlikely(master: _Tensor) -> bool:
    return _HINTS.search(master.name.rpartition("/")[2] or master.name) is None
