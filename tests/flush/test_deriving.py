"""Derived tensors are found by digests, whatever order bytes come in."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from laststep.codecs.rounding import rounded
from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.flush.deriving import Deriving, Misses
from laststep.flush.encoder import LayoutEncoder
from laststep.format.deriving import ROUNDED, Master
from laststep.format.index import written_of
from laststep.plan.files import MasterPair
from saves_of import History, layout_of, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from laststep.flush.deriving import DerivedFile
    from laststep.format.layout import FileLayout

COUNT = 5 * CHUNK_BYTES // 4 // 4
"""Elements of the master, which lies in two chunks."""
MASTERS, MODEL = 0, 1


def layout(name: str, *tensors: tuple[str, str, int]) -> FileLayout:
    """A file of tensors, each with its name, dtype and count of elements."""
    sized = [(tensor, dtype, n * (4 if dtype == "float32" else 2)) for tensor, dtype, n in tensors]
    return layout_of(*sized, name=name, item=name)


FILES = (
    layout("masters", ("w", "float32", COUNT), ("other", "float32", COUNT)),
    layout("model", ("w", "bfloat16", COUNT)),
)
PAIRS = [MasterPair(1, 0, 0, 1), MasterPair(1, 0, 0, 0)]


def deriving(
    files: Sequence[FileLayout],
    pairs: Sequence[MasterPair],
    misses: Misses | None = None,
    failed: Callable[[], bool] = lambda: False,
    *,
    is_declared: bool = False,
) -> Deriving:
    misses = Misses() if misses is None else misses
    return Deriving(files, pairs, misses, failed, is_declared=is_declared)


@pytest.fixture(scope="module")
def values() -> np.ndarray:
    return np.random.default_rng(3).standard_normal(COUNT).astype(np.float32)


@pytest.fixture(scope="module")
def image(values: np.ndarray) -> memoryview:
    """Of the file of masters: the first is another one."""
    return memoryview(values.tobytes() + (values + 1).tobytes())


def chunks(image: memoryview) -> list[tuple[int, memoryview]]:
    starts = range(0, len(image), CHUNK_BYTES)
    return [(start, image[start : start + CHUNK_BYTES]) for start in starts]


def made(
    misses: Misses | None = None,
    failed: Callable[[], bool] = lambda: False,
    *,
    is_declared: bool = False,
) -> tuple[Deriving, DerivedFile]:
    save = deriving(FILES, PAIRS, misses, failed, is_declared=is_declared)
    derived = save.files.get(MODEL)
    assert derived is not None
    return save, derived


def payloads(derived: DerivedFile, model: memoryview) -> list[bytes | None]:
    return [
        derived.payload(number, model[at : at + BLOCK_BYTES])
        for number, at in enumerate(range(0, len(model), BLOCK_BYTES))
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_a_master_may_come_in_any_order(image: memoryview, order: int) -> None:
    save, derived = made()
    for start, data in chunks(image)[::order]:
        save.take(MASTERS, start, data)
    model = rounded(image[: 4 * COUNT], "bfloat16")
    assert payloads(derived, model) == [b"\x01"] * (-(-len(model) // BLOCK_BYTES))
    assert derived.used() == {"w": Master("masters", "w")}


def test_the_candidate_whose_rounding_it_is_is_found(image: memoryview) -> None:
    save, derived = made()
    for start, data in chunks(image):
        save.take(MASTERS, start, data)
    model = rounded(image[4 * COUNT :], "bfloat16")
    assert set(payloads(derived, model)) == {b"\x01"}
    assert derived.used() == {"w": Master("masters", "other")}


def test_what_comes_before_its_master_is_stored(image: memoryview) -> None:
    _, derived = made()
    assert set(payloads(derived, rounded(image[: 4 * COUNT], "bfloat16"))) == {None}


def test_a_master_that_another_thread_has_is_waited_for(image: memoryview) -> None:
    waits = threading.Event()

    def failed() -> bool:
        """Asked by who is about to wait."""
        waits.set()
        return False

    save, derived = made(failed=failed)
    for start, _ in chunks(image):
        save.expect(MASTERS, start)
    save.expect(MODEL, 0)
    model, found = rounded(image[: 4 * COUNT], "bfloat16"), []
    waiting = threading.Thread(
        target=lambda: found.append(derived.payload(0, model[:BLOCK_BYTES])), daemon=True
    )
    waiting.start()
    assert waits.wait(60)
    for start, data in chunks(image):
        save.take(MASTERS, start, data)
    waiting.join()
    assert found == [b"\x01"]


def test_a_master_that_is_behind_in_the_queue_is_not_waited_for(image: memoryview) -> None:
    save, derived = made()
    save.expect(MODEL, 0)
    for start, _ in chunks(image):
        save.expect(MASTERS, start)
    assert derived.payload(0, rounded(image[: 4 * COUNT], "bfloat16")[:BLOCK_BYTES]) is None


def test_nobody_waits_in_a_save_that_has_failed(image: memoryview) -> None:
    save, derived = made(failed=lambda: True)
    for start, _ in chunks(image):
        save.expect(MASTERS, start)
    save.expect(MODEL, 0)
    assert derived.payload(0, rounded(image[: 4 * COUNT], "bfloat16")[:BLOCK_BYTES]) is None


def test_a_candidate_that_was_wrong_twice_is_left_alone_for_some_saves(image: memoryview) -> None:
    misses = Misses()
    model = rounded(image[: 4 * COUNT], "bfloat16")
    tried = []
    for _ in range(20):
        save, derived = made(misses)
        tried.append(bool(save.among(MASTERS, 6 * CHUNK_BYTES // 4, 6 * CHUNK_BYTES // 4 + 1)))
        for start, data in chunks(image):
            save.take(MASTERS, start, data)
        assert None not in payloads(derived, model)
        save.end()
    assert [number for number, is_tried in enumerate(tried) if is_tried] == [0, 1, 16]


def test_a_declared_master_is_tried_at_every_save(image: memoryview) -> None:
    misses = Misses()
    for _ in range(4):
        save, derived = made(misses, is_declared=True)
        assert save.among(MASTERS, 6 * CHUNK_BYTES // 4, 6 * CHUNK_BYTES // 4 + 1)
        for start, data in chunks(image):
            save.take(MASTERS, start, data)
        assert None not in payloads(derived, rounded(image[: 4 * COUNT], "bfloat16"))
        save.end()


def test_a_block_with_masters_in_it_is_never_left_out_itself() -> None:
    count = BLOCK_BYTES // 4
    small = layout("one", ("m", "float32", 8), ("w", "bfloat16", 8))
    assert deriving((small,), [MasterPair(0, 1, 0, 0)]).files.get(0) is None
    large = layout(
        "one", ("m", "float32", 4 * count), ("n", "float32", 16), ("w", "bfloat16", 4 * count)
    )
    values = np.arange(4 * count, dtype=np.float32).tobytes()
    image = memoryview(values + bytes(64) + bytes(rounded(values, "bfloat16")))
    save = deriving((large,), [MasterPair(0, 2, 0, 0), MasterPair(0, 2, 0, 1)])
    save.take(0, 0, image)
    derived = save.files.get(0)
    assert derived is not None
    assert payloads(derived, image) == [None] * 5 + [b"\x01"] * 2


def test_nobody_waits_for_a_master_that_is_never_rounded() -> None:
    def failed() -> bool:
        raise AssertionError("somebody waits")

    count = CHUNK_BYTES // 4
    one = layout("one", ("m", "float32", count + 8), ("w", "bfloat16", count + 8))
    save = deriving((one,), [MasterPair(0, 1, 0, 0)], failed=failed)
    for start in range(0, one.tensor_bytes, CHUNK_BYTES):
        save.expect(0, start)
    derived = save.files.get(0)
    assert derived is not None
    # The first bytes of `w` lie beside the last of its master, in a later chunk than the others.
    assert derived.payload(CHUNK_BYTES // BLOCK_BYTES, memoryview(bytes(BLOCK_BYTES))) is None


def test_a_block_that_is_derived_in_part_keeps_the_rest() -> None:
    files = (
        layout("masters", ("b", "float32", 4)),
        layout("model", ("a", "bfloat16", 3), ("b", "bfloat16", 4)),
    )
    save = deriving(files, [MasterPair(1, 1, 0, 0)])
    values = np.arange(4, dtype=np.float32).tobytes()
    save.take(0, 0, memoryview(values))
    derived = save.files.get(1)
    assert derived is not None
    block = memoryview(b"abcdef" + bytes(rounded(values, "bfloat16")))
    assert derived.payload(0, block) == b"\x01abcdef"
    encoder = LayoutEncoder(files[1])
    encoder.derived = derived
    assert encoder.encode(0, block, b"", None) == (b"\x01abcdef", ROUNDED, None)
    other = memoryview(b"abcdef" + bytes(8))
    assert encoder.encode(0, other, b"", None) == (other, None, None)


def test_masters_have_to_come_although_they_did_not_change(tmp_path: Path) -> None:
    count = 3 * BLOCK_BYTES // 2
    history = History(
        tmp_path,
        layout("masters.safetensors", ("w", "float32", count)),
        layout("model.safetensors", ("frozen", "bfloat16", 4 * count), ("w", "bfloat16", count)),
        derived=[MasterPair(1, 1, 0, 0)],
    )
    master = np.random.default_rng(3).standard_normal(count).astype(np.float32).tobytes()
    weights = bytes(rounded(master, "bfloat16"))
    images = [master, bytes(8 * count) + weights]
    history.save(*images)
    then = history.begin()
    assert then.reuse([(0, 0, len(images[0])), (1, 0, len(images[1]))]) == ()
    assert then.reuse([(1, 0, 8 * count)]) == ((1, 0, 8 * count),)
    write(then, 0, images[0], 0, len(images[0]))
    write(then, 1, images[1], 8 * count, len(weights))
    index = history.commit(then)
    assert history.read() == images
    assert index.layouts[1].derived == {"w": Master("masters.safetensors", "w")}
    assert index.size_bytes - written_of(index, b"").shared_bytes < BLOCK_BYTES
