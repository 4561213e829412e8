"""Median, least and most of repetitions, and what the samples of a peer come to."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bench.raw import DiskSample
    from bench.rotation import PeerResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    least: float
    most: float
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """None where nothing was measured."""
    known = list(values)
    if not known:
        return None
    return Spread(
        median=statistics.median(known), least=min(known), most=max(known), count=len(known)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A peer's figures. Timings taken while memory was sampled are left out if others exist."""

    name: str
    status: str
    lost_first_s: Spread | None
    lost_next_s: Spread | None
    lost_s: Spread | None
    """First and next saves together."""
    stall_s: Spread | None
    worst_s: Spread | None
    durable_s: Spread | None
    load_s: Spread | None
    peak_bytes: int | None
    bit_equal: bool | None
    notes: list[str]


def summarise(peer: PeerResult) -> Summary:
    """The figures of one peer."""
    saves = [s for s in peer.saves if not s.memory_sampled] or peer.saves
    return Summary(
        name=peer.name,
        status=peer.status,
        lost_first_s=spread(s.lost_s for s in saves if s.first),
        lost_next_s=spread(s.lost_s for s in saves if not s.first),
        lost_s=spread(s.lost_s for s in saves),
        stall_s=spread(s.stall_s for s in saves),
        worst_s=spread(s.worst_s for s in saves),
        durable_s=spread(s.durable_s for s in saves),
        load_s=spread(load.seconds for load in peer.loads),
        peak_bytes=max((peak.pss_bytes for peak in peer.peaks), default=None),
        bit_equal=all(load.bit_equal for load in peer.loads) if peer.loads else None,
        notes=peer.notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RawSummary:
    """The disk's limits in bytes per second, over the repetitions of a rotation."""

    write: Spread | None
    read: Spread | None
    read_to_device: Spread | None


def summarise_raw(samples: list[DiskSample]) -> RawSummary:
    """Rates of the samples taken among the peers."""
    return RawSummary(
        write=spread(s.size_bytes / s.write_s for s in samples),
        read=spread(s.size_bytes / s.read_s for s in samples),
        read_to_device=spread(
            s.size_bytes / s.read_to_device_s for s in samples if s.read_to_device_s is not None
        ),
    )
