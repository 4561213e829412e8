"""The one table of the torture, as text and as values that JSON has."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tally import KINDS, Tally

if TYPE_CHECKING:
    from collections.abc import Mapping

NOT_HERE = "not possible here: "
"""How a note begins that says which fault could not be injected on this machine, and why."""

Row = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a part came to."""

    tally: Tally
    seconds: float


def table(results: Mapping[str, Result], *, seed: int, seconds: float) -> str:
    """Faults by kind, notes, what was compared, what was found; then each finding."""
    total = _total(results)
    rows: list[Row] = [("seed", f"{seed}"), ("seconds", f"{seconds:,.0f}"), ("", "")]
    for name, result in results.items():
        tally = result.tally
        per_minute = tally.faults.total() / max(result.seconds, 1e-9) * 60
        how = f"{tally.trials:,} trials in {result.seconds:,.0f} s, {per_minute:,.0f} a minute"
        rows.append((f"{name}: {how}", f"{tally.faults.total():,}"))
        rows += [(f"  {what}", f"{count:,}") for what, count in sorted(tally.faults.items())]
    rows += [("", ""), ("notes", "")]
    rows += [(f"  {what}", f"{count:,}") for what, count in sorted(total.notes.items())]
    rows += [
        ("", ""),
        ("faults injected", f"{total.faults.total():,}"),
        ("checkpoints compared", f"{total.compared:,}"),
    ]
    rows += [(_plural(kind), f"{count}") for kind, count in found(total).items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value:>12}".rstrip() for name, value in rows]
    return "\n".join([*lines, *(f"\n{finding}" for finding in total.findings)])


def plain(results: Mapping[str, Result], *, seed: int) -> dict[str, object]:
    """The same for programs, and for docs/guides/guarantees.md."""
    total = _total(results)
    return {
        "seed": seed,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "faults": total.faults.total(),
        "compared": total.compared,
        "found": found(total),
        "parts": {
            name: {**result.tally.to_plain(), "seconds": round(result.seconds, 1)}
            for name, result in results.items()
        },
    }


def found(tally: Tally) -> dict[str, int]:
    """How many findings there are of each kind."""
    return {kind: sum(one.kind == kind for one in tally.findings) for kind in KINDS}


def _total(results: Mapping[str, Result]) -> Tally:
    total = Tally()
    for result in results.values():
        total.add(result.tally)
    return total


def _plural(kind: str) -> str:
    return {"wrong": "wrong", "crash": "crashes"}.get(kind, f"{kind}s")
