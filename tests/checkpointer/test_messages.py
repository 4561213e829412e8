"""What errors and log lines say: what, where, expected, found, and what to do next."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from expect import names, raises, warned
from laststep import events
from laststep.events import log_event

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_mismatch_says_where_and_what_to_do_in_one_sentence_and_then_lists_all(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1)
    fresh.blob["data"] = torch.zeros(9, dtype=torch.uint8)
    with opened(fresh) as checkpointer:
        with pytest.raises(laststep.MismatchError) as caught:
            checkpointer.restore()
        one = caught.value
        first, *rest = str(one).splitlines()
        assert one.where == f"{run}/step-00000001.1-1"
        assert names(first, one.where, "strict=False", "only=[…]")
        assert len(rest) == 1
        assert names(rest[0], "blob/data", "uint8[3145728]", "uint8[9]")
        fresh.blob["more"] = torch.zeros(9)
        with raises(laststep.MismatchError, where=one.where):
            checkpointer.restore()


def test_a_traceback_ends_at_the_public_call_and_is_whole_in_the_debug_log(
    saved: Callable[..., Path],
    opened: object,
    fresh: object,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved(1)
    fresh.blob["data"] = torch.zeros(9, dtype=torch.uint8)

    def nowhere() -> None:
        laststep.load(tmp_path / "nowhere")

    with opened(fresh) as checkpointer, caplog.at_level(logging.DEBUG, "laststep.errors"):
        for call in (checkpointer.restore, nowhere, lambda: checkpointer.save(-1)):
            caplog.clear()
            with pytest.raises(laststep.LaststepError) as caught:
                call()
            ours = [entry for entry in caught.traceback if "/laststep/" in str(entry.path)]
            assert [entry.name for entry in ours] == ["shortened"]
            record = caplog.records[0]
            assert record.exc_info is not None


def test_the_traceback_of_an_error_that_is_being_handled_stays(tmp_path: Path) -> None:
    try:
        int("of the training")
    except ValueError:
        with pytest.raises(laststep.NotFoundError) as caught:
            laststep.load(tmp_path / "nowhere")
    context = caught.value.__context__
    while context is not None and not isinstance(context, ValueError):
        context = context.__context__
    assert context is not None
    assert context.__traceback__ is not None


def test_problems_are_the_same_type_wherever_they_are_told(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    saved(1)
    fresh.blob["new"] = torch.zeros(9)
    with opened(fresh) as checkpointer:
        with pytest.raises(laststep.MismatchError) as caught:
            checkpointer.restore()
        told = checkpointer.restore(strict=False).problems
    assert type(caught.value.problems) is type(told) is laststep.Problems
    assert caught.value.problems == told
    assert len(told) == 1
    assert told.missing == ("blob/new",)
    assert not laststep.Problems()
    assert not laststep.MismatchError("something").problems


def test_a_long_list_is_cut_in_the_message_only(tmp_path: Path) -> None:
    laststep.save({f"t{n}": torch.zeros(1) for n in range(70)}, tmp_path / "one")
    with pytest.raises(laststep.MismatchError) as caught:
        laststep.load(tmp_path / "one", into={"a": 1})
    assert len(caught.value.problems) == 70
    lines = str(caught.value).splitlines()
    # ten, how many more, and the remedy once more
    assert (len(lines), "60" in lines[-2], lines[-1]) == (13, True, caught.value.remedy)
    assert caught.value.without_remedy().count("\n") == 11


def test_load_suggests_only_what_it_can_do(tmp_path: Path) -> None:
    laststep.save({"a": torch.zeros(2)}, tmp_path / "one")
    with raises(laststep.MismatchError, remedy="strict=False") as caught:
        laststep.load(tmp_path / "one", into={"a": torch.zeros(3)})
    assert "only=" not in str(caught.value)
    assert caught.value.where == str(tmp_path / "one")
    with laststep.Checkpointer(
        tmp_path / "run", m=nn.Linear(1, 1), options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.save(0)
    with pytest.raises(laststep.MismatchError) as caught:
        laststep.load(tmp_path / "run", into={"m": nn.Linear(2, 2)})
    assert caught.value.where == f"{tmp_path}/run/step-00000000.1-1"


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {"f": lambda: None}}, "a['f'] of item 'odd'"),
        ([object()], "0 of item 'odd'"),
        ({"t": torch.empty(2, device="meta")}, "t of item 'odd'"),
        ({object(): torch.zeros(2)}, "item 'odd'"),
    ],
)
def test_what_cannot_be_saved_is_told_with_the_name_of_its_item(
    value: object, where: str, run_folder: Path
) -> None:
    items = {"fine": {"a": 1}, "odd": value}
    options = laststep.Options(flush="thread")
    with (
        laststep.Checkpointer(run_folder, items=items, options=options) as checkpointer,
        raises(laststep.UsageError, where=where, remedy=True),
    ):
        checkpointer.save(0)


def test_what_shows_only_when_it_is_serialised_names_its_item_and_suggests_no_pickle(
    run_folder: Path,
) -> None:
    odd = {"set": {object()}}
    with laststep.Checkpointer(
        run_folder, odd=odd, options=laststep.Options(flush="thread"), allow_pickle=True
    ) as checkpointer:
        checkpointer.save(0)
        with raises(laststep.UsageError, where="of item 'odd'", step=0) as caught:
            checkpointer.wait()
    assert "set" in str(caught.value)
    assert "pickle" not in str(caught.value)


class Broken:
    def state_dict(self) -> dict[str, object]:
        raise ZeroDivisionError

    def load_state_dict(self, state: dict[str, object]) -> None: ...


def test_an_error_out_of_a_state_dict_is_left_as_it_is_and_says_whose_it_was(
    run_folder: Path,
) -> None:
    with laststep.Checkpointer(
        run_folder, broken=Broken(), options=laststep.Options(flush="thread")
    ) as checkpointer:
        with pytest.raises(ZeroDivisionError) as caught:
            checkpointer.save(0)
        assert names(caught.value.__notes__[0], "'broken'")


@pytest.mark.parametrize("allow_pickle", [False, True])
def test_metadata_that_cannot_be_stored_is_told_with_a_remedy_that_works(
    allow_pickle: bool, run_folder: Path
) -> None:
    with laststep.Checkpointer(
        run_folder, s={"a": 1}, options=laststep.Options(flush="thread"), allow_pickle=allow_pickle
    ) as checkpointer:
        for wrong in ({"f": object()}, {"f": torch.zeros(1)}):
            with raises(laststep.UsageError, where="f of the metadata", remedy="float()") as caught:
                checkpointer.save(0, metadata=wrong)
            assert "pickle" not in str(caught.value)


def test_a_closed_checkpointer_says_what_to_do(run_folder: Path) -> None:
    checkpointer = laststep.Checkpointer(
        run_folder, s={"a": 1}, options=laststep.Options(flush="thread")
    )
    checkpointer.close()
    for call in (lambda: checkpointer.save(0), checkpointer.restore):
        with raises(laststep.UsageError, remedy=True):
            call()


def test_a_save_that_would_leave_checkpoints_behind_says_what_to_write(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(3)
    with opened(fresh) as checkpointer:
        for _ in range(2):
            with raises(laststep.UsageError, found="step 3", remedy="restore()") as refused:
                checkpointer.save(4)
        assert "new_lineage=True" in refused.value.remedy
        assert checkpointer.restore().step == 3
        checkpointer.save(4).result()
    assert laststep.open(run).steps() == [3, 4]


def test_what_another_commits_before_the_first_save_is_not_left_behind(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    with opened(fresh) as checkpointer:
        run = saved(3)
        with raises(laststep.UsageError, found="step 3"):
            checkpointer.save(4)
    assert laststep.open(run).steps() == [3]


def test_a_new_lineage_begins_where_it_is_asked_for(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(3)
    with opened(fresh, new_lineage=True) as checkpointer:
        checkpointer.save(0)
        checkpointer.save(1)
    assert laststep.open(run).steps() == [0, 1]
    with opened(fresh, new_lineage=True) as checkpointer:
        assert checkpointer.restore().step == 1
        checkpointer.save(2)
    assert laststep.open(run).steps() == [0, 1, 2]


def preflight(**fields: object) -> events.Preflight:
    known = {
        "state_bytes": 100 << 20,
        "host_memory_bytes": 1 << 30,
        "free_disk_bytes": 10 << 30,
        "needed_disk_bytes": 200 << 20,
        "kept_checkpoints": None,
    }
    return events.Preflight(**{**known, **fields})


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (preflight(), ("10.74 GB",)),
        (preflight(kept_checkpoints=3), ("104.86 MB", "1.07 GB", "209.72 MB", "3", "10.74 GB")),
        (preflight(free_disk_bytes=None), ("unknown",)),
        (preflight(ranks=3), ("104.86 MB", "3 ranks", "1.07 GB per rank", "209.72 MB")),
    ],
)
def test_the_line_before_the_first_save_reads_well_whatever_is_unknown(
    event: events.Preflight, line: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="laststep")
    log_event(event)
    (record,) = caplog.records
    assert names(record.getMessage(), *line)
    assert "None" not in record.getMessage()


def test_a_disk_that_is_short_is_told(caplog: pytest.LogCaptureFixture) -> None:
    log_event(preflight(kept_checkpoints=4, free_disk_bytes=0))
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert names(record.getMessage(), "209.72 MB", "4", "only 0 bytes")


def test_a_part_without_a_live_item_is_told_from_one_that_is_not_stored(
    saved: Callable[..., Path], fresh: object
) -> None:
    run = saved(1)
    with laststep.Checkpointer(
        run, model=fresh.model, options=laststep.Options(flush="thread")
    ) as checkpointer:
        with raises(laststep.NotFoundError, expected="optimizer") as caught:
            checkpointer.restore(only=["optimizer"])
        one = caught.value
        assert one.where == f"{run}/step-00000001.1-1"
        assert names(one.found, "model", "blob, model, optimizer, plain")
        with raises(
            laststep.NotFoundError, expected="model/nothing", remedy="`laststep show --all`"
        ):
            checkpointer.restore(only=["model/nothing"])


def test_what_is_passed_over_comes_without_the_advice_to_do_just_that(
    saved: Callable[..., Path], opened: object, fresh: object, caplog: pytest.LogCaptureFixture
) -> None:
    run = saved(1, 2)
    (run / "step-00000002.1-2" / "manifest.json").write_bytes(b"{}")
    with opened(fresh) as checkpointer:
        restored = checkpointer.restore()
        assert restored.step == 1
        assert "restore()" not in restored.skipped[0].reason + caplog.text
        (run / "step-00000001.1-1" / "manifest.json").write_bytes(b"{}")
        with raises(laststep.CorruptError, where=run, found="step 2") as caught:
            checkpointer.restore()
    assert "restore()" not in str(caught.value)
    assert f"`laststep verify {run}`" in str(caught.value)


def test_a_raise_in_a_load_state_dict_names_the_item(run_folder: Path) -> None:
    class Choosy:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise KeyError("n")

    with laststep.Checkpointer(
        run_folder, mine=Choosy(), options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0).wait()
        with pytest.raises(laststep.MismatchError) as caught:
            checkpointer.restore()
    assert caught.value.where == "item 'mine'"
    assert caught.value.found == "KeyError: 'n'"
    assert isinstance(caught.value.__cause__, KeyError)


def test_what_strict_false_leaves_alone_is_warned_of(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with laststep.Checkpointer(
        run_folder, a={"w": torch.ones(2)}, b={"w": torch.ones(3)}
    ) as saving:
        saving.save(0)
    live = {"w": torch.zeros(2)}, {"w": torch.zeros(4)}
    with laststep.Checkpointer(run_folder, a=live[0], b=live[1]) as checkpointer:
        restored = checkpointer.restore(strict=False)
    assert len(restored.problems) == 1
    assert live[0]["w"].sum() == 2
    assert warned(caplog, "b/w", "float32[3]")


@pytest.mark.parametrize("name", ["model", "net"])
def test_a_checkpoint_of_which_nothing_fits_is_not_restored_whatever_strict_says(
    name: str, run_folder: Path
) -> None:
    with laststep.Checkpointer(run_folder, model=torch.nn.Linear(8, 8)) as saving:
        saving.save(0)
    with laststep.Checkpointer(run_folder, items={name: torch.nn.Linear(8, 9)}) as checkpointer:
        with pytest.raises(laststep.MismatchError, match=r"\b2\b") as raised:
            checkpointer.restore(strict=False)
        assert len(raised.value.problems) == 2
        with raises(
            laststep.UsageError, where=run_folder, found="step 0", remedy="new_lineage=True"
        ):
            checkpointer.save(1)


def test_plain_values_alone_are_something(run_folder: Path) -> None:
    with laststep.Checkpointer(run_folder, model=torch.nn.Linear(2, 2), n={"n": 7}) as saving:
        saving.save(0)
    live = {"n": 0}
    with laststep.Checkpointer(run_folder, model=torch.nn.Linear(3, 3), n=live) as checkpointer:
        checkpointer.restore(strict=False)
    assert live == {"n": 7}
