"""Arguments that cannot work are refused at once, with what was expected, found, and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

import laststep
from expect import raises
from laststep import arguments
from laststep.arguments import check_early
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def assert_tells_all(error: laststep.UsageError) -> None:
    assert all((error.what, error.expected, error.found, error.remedy))


@pytest.mark.parametrize(
    "setting",
    [
        {"writers": "4"},
        {"writers": 2.0},
        {"writers": True},
        {"writers": 0},
        {"writers": None},
        {"host_memory_bytes": "1GB"},
        {"host_memory_bytes": 1e9},
        {"host_memory_bytes": 5},
        {"device_margin_bytes": "0"},
        {"device_margin_bytes": None},
        {"device_margin_bytes": -1},
        {"allow_pickle": "no"},
        {"progress": 1},
        {"capture": 3},
        {"flush": []},
        {"on_busy": None},
    ],
    ids=str,
)
def test_a_setting_of_the_wrong_type_is_refused(setting: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(laststep.UsageError, match=next(iter(setting))) as caught:
        laststep.Checkpointer(tmp_path / "run", s={"a": 1}, **as_keywords(setting))
    assert_tells_all(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [{"seen": 1}, nn.Linear(1, 1)], ids=["dict", "module"])
def test_an_item_named_as_a_setting_is_answered_with_the_way_to_pass_it(
    value: object, tmp_path: Path
) -> None:
    with raises(laststep.UsageError, remedy="items={'lossy': …"):
        laststep.Checkpointer(tmp_path / "run", lossy=value)
    items = {"lossy": value}
    laststep.Checkpointer(
        tmp_path / "run", items=items, options=laststep.Options(flush="thread")
    ).close()


@pytest.mark.parametrize(
    "value", [nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)]), {}], ids=type
)
def test_a_part_of_the_state_without_a_name_is_refused(value: object, tmp_path: Path) -> None:
    with raises(laststep.UsageError, remedy="Checkpointer(run, model=model") as caught:
        laststep.Checkpointer(tmp_path / "run", value)
    assert_tells_all(caught.value)


def test_rules_that_cannot_be_are_answered_with_ones_that_can() -> None:
    with raises(laststep.UsageError, "last", found="0"):
        laststep.Keep(last=0)
    with raises(laststep.UsageError, remedy="Keep(best=2, metric='loss')"):
        laststep.Keep(best=2)


def test_an_integer_of_numpy_is_a_setting_and_a_step(tmp_path: Path) -> None:
    with laststep.Checkpointer(
        tmp_path / "run",
        s={"a": 1},
        options=laststep.Options(writers=np.int64(2), flush="thread", progress=False),
        host_memory_bytes=np.uint32(64 << 20),
    ) as checkpointer:
        checkpointer.save(np.int16(3)).wait()
        assert checkpointer.restore(np.int64(3)).step == 3


@pytest.mark.parametrize("run", [None, 3, b"bytes", "", "nul\0byte"])
def test_a_run_that_is_no_path_is_refused(run: object) -> None:
    with raises(laststep.UsageError, expected=True, found=True) as caught:
        laststep.Checkpointer(run, s={"a": 1})
    assert_tells_all(caught.value)


def test_items_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    with raises(laststep.UsageError, found="list", remedy="items={'model': model, …}") as caught:
        laststep.Checkpointer(tmp_path / "run", items=[{"a": 1}])
    assert_tells_all(caught.value)


@pytest.mark.parametrize("step", [torch.tensor(3), torch.tensor([3]), torch.tensor(2.5)])
def test_a_tensor_as_a_step_is_refused_with_the_way_to_pass_it(
    step: torch.Tensor, opened: object, training: object
) -> None:
    with opened(training) as checkpointer:
        for call in (checkpointer.save, checkpointer.restore):
            with pytest.raises(laststep.UsageError, match=r"int\(step\)") as caught:
                call(step)
            assert_tells_all(caught.value)
        checkpointer.save(0).wait()


@pytest.mark.parametrize("step", [True, np.array([1, 2]), 1.0, -1, "3", 1 << 62])
def test_a_step_that_is_no_number_is_refused_by_save_and_restore(
    step: object, opened: object, training: object
) -> None:
    with opened(training) as checkpointer:
        for call in (checkpointer.save, checkpointer.restore):
            with raises(laststep.UsageError, expected=str((1 << 62) - 1), remedy=True) as caught:
                call(step)
            assert_tells_all(caught.value)


@pytest.mark.parametrize("metrics", [0.5, [("loss", 1)], "loss", torch.tensor(1.0)])
def test_metrics_without_names_are_refused_and_nothing_is_begun(
    metrics: object, opened: object, training: object, run_folder: Path
) -> None:
    with opened(training) as checkpointer:
        with pytest.raises(laststep.UsageError, match=r"metrics=\{'loss': loss\}") as caught:
            checkpointer.save(0, metrics=metrics)
        assert_tells_all(caught.value)
        assert not run_folder.exists()
        checkpointer.save(0, metrics={}).wait()


def test_a_lone_module_is_not_all_items_of_a_run(saved: Callable[..., Path], fresh: object) -> None:
    run = saved(1)
    with raises(laststep.UsageError, remedy="into={'model'") as caught:
        laststep.load(run, into=fresh.model)
    assert_tells_all(caught.value)


def test_one_pattern_may_stand_for_itself(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    saved(1)
    fresh.become(7)
    with opened(fresh) as checkpointer:
        checkpointer.restore(only="model")
        assert fresh.values() == {"model": {1}, "optimizer": {7}, "plain": {7}, "blob": {7}}
        checkpointer.restore(only="blob/mo*")
        assert fresh.blob["more"].unique().tolist() == [1]
        with pytest.raises(laststep.NotFoundError, match="modle"):
            checkpointer.restore(only="modle")


@pytest.mark.parametrize("only", [3, [3], ["model", None], b"model"])
def test_parts_that_are_no_text_are_refused(
    only: object, saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    saved(1)
    with opened(fresh) as checkpointer:
        with pytest.raises(laststep.UsageError, match="only") as caught:
            checkpointer.restore(only=only)
        assert_tells_all(caught.value)


@pytest.mark.parametrize(
    ("check", "wrong", "told"),
    [
        (lambda streams: arguments.save_request(0, None, None, False, streams), 3, "[stream]"),
        (arguments.patterns, [], "only=['model']"),
    ],
)
def test_a_sequence_of_something_else_is_told_in_its_own_words(
    check: Callable[[object], object], wrong: object, told: str
) -> None:
    with raises(laststep.UsageError, found=repr(wrong), remedy=told):
        check(wrong)


@pytest.mark.parametrize(
    ("method", "wrong"),
    [
        ("save", {"overwrite": 1}),
        ("save", {"overwrite": "yes"}),
        ("save", {"overwrite": None}),
        ("save", {"streams": 3}),
        ("save", {"streams": ["default"]}),
        ("save", {"streams": None}),
        ("restore", {"strict": 0}),
        ("restore", {"strict": "no"}),
        ("restore", {"only": []}),
        ("restore", {"only": ()}),
        ("wait", {"timeout_s": "1"}),
        ("wait", {"timeout_s": True}),
        ("wait", {"timeout_s": float("nan")}),
    ],
    ids=str,
)
def test_an_argument_of_the_wrong_type_is_refused_and_the_flusher_lives(
    method: str, wrong: dict[str, object], opened: object, training: object
) -> None:
    with opened(training) as checkpointer:
        steps = (0,) if method == "save" else ()
        with pytest.raises(laststep.UsageError, match=next(iter(wrong))) as caught:
            getattr(checkpointer, method)(*steps, **wrong)
        assert_tells_all(caught.value)
        checkpointer.save(0, overwrite=np.bool_(True), streams=[]).wait()
        assert checkpointer.wait(np.float32(1))
        assert checkpointer.restore(strict=np.bool_(True)).step == 0


@pytest.mark.parametrize("subscribers", [print, [3], "log", 3, None])
def test_subscribers_that_cannot_be_told_are_refused(subscribers: object, tmp_path: Path) -> None:
    with pytest.raises(laststep.UsageError, match=r"subscribers=\[on_event\]") as caught:
        laststep.Checkpointer(
            tmp_path / "run", s={"a": 1}, options=laststep.Options(subscribers=subscribers)
        )
    assert_tells_all(caught.value)


def test_the_largest_step_is_named_and_can_be_saved(opened: object, training: object) -> None:
    with opened(training) as checkpointer:
        with pytest.raises(laststep.UsageError, match=str((1 << 62) - 1)):
            checkpointer.save(1 << 63)
        checkpointer.save((1 << 62) - 1).wait()


@pytest.mark.parametrize("run", ["ftp://bucket/run", "hdfs://bucket"])
def test_a_run_that_is_no_folder_is_refused(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with raises(laststep.UsageError, found=repr(run)) as caught:
        laststep.Checkpointer(run, s={"a": 1})
    assert_tells_all(caught.value)


def test_a_run_may_be_below_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with laststep.Checkpointer(
        "~/run", s={"a": 1}, options=laststep.Options(flush="thread")
    ) as checkpointer:
        assert checkpointer.path == str(tmp_path / "run")


def test_an_item_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with raises(laststep.UsageError, found="model", expected="items={…}") as caught:
        laststep.Checkpointer(tmp_path / "run", items={"model": {"a": 1}}, model={"a": 2})
    assert_tells_all(caught.value)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"kep": laststep.Keep(last=3)}, "keep=…"),
        ({"writer": 3}, "options=laststep.Options(writers=…)"),
        ({"alow_pickle": True}, "allow_pickle=…"),
        ({"captur": "lazy"}, "capture=…"),
        ({"subscriber": print}, "subscribers=…"),
        ({"deadline": 60}, "options=laststep.Options(deadline_s=…)"),
        ({"compare_replica": "never"}, "options=laststep.Options(compare_replicas=…)"),
        ({"new_linage": True}, "new_lineage=…"),
    ],
    ids=str,
)
def test_a_misspelt_setting_is_not_taken_for_an_item(
    given: dict[str, object], meant: str, tmp_path: Path
) -> None:
    with raises(laststep.UsageError, found=next(iter(given))) as caught:
        laststep.Checkpointer(tmp_path / "run", s={"a": 1}, **given)
    assert_tells_all(caught.value)
    assert meant in caught.value.remedy


@pytest.mark.parametrize("value", [3, 0.5, "text", True, len])
def test_a_keyword_that_can_be_neither_a_setting_nor_an_item_is_told_as_such(
    value: object, tmp_path: Path
) -> None:
    with raises(laststep.UsageError, "retries", found="retries=") as caught:
        laststep.Checkpointer(tmp_path / "run", s={"a": 1}, retries=value)
    assert_tells_all(caught.value)
    assert "?" not in caught.value.remedy
    assert "host_memory_bytes" in caught.value.expected


@pytest.mark.parametrize("name", laststep.Options.__struct_fields__)
def test_a_setting_of_options_is_no_item(name: str, tmp_path: Path) -> None:
    with pytest.raises(laststep.UsageError) as caught:
        laststep.Checkpointer(tmp_path / "run", s={"a": 1}, **{name: "thread"})
    assert f"options=laststep.Options({name}=" in caught.value.remedy
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [{"optimizer/*": "bf16"}, None, [print]], ids=str)
def test_a_value_that_only_a_setting_takes_is_no_item(value: object, tmp_path: Path) -> None:
    name = "subscribers" if isinstance(value, list) else "lossy"
    with raises(laststep.UsageError, remedy="laststep.Options("):
        laststep.Checkpointer(tmp_path / "run", s={"a": 1}, **{name: value})


def test_an_item_may_have_the_name_of_a_setting(tmp_path: Path) -> None:
    with laststep.Checkpointer(tmp_path / "run", progress={"epoch": 3}) as checkpointer:
        checkpointer.save(1)
    progress = {"epoch": 0}
    with laststep.Checkpointer(tmp_path / "run", progress=progress) as checkpointer:
        checkpointer.restore()
    assert progress == {"epoch": 3}


def test_an_unknown_option_is_refused_with_the_one_that_was_meant() -> None:
    with raises(laststep.UsageError, "Options", remedy="did you mean writers=…?"):
        laststep.Options(writer=3)
    with raises(laststep.UsageError, "Keep", remedy="did you mean best=…?"):
        laststep.Keep(last=3, bets=2)
    with raises(laststep.UsageError, "Keep"):
        laststep.Keep(3)


def test_a_plain_loader_is_refused_with_the_one_that_resumes(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader([1, 2, 3])
    with raises(laststep.UsageError, "DataLoader", "StatefulDataLoader"):
        laststep.Checkpointer(tmp_path / "run", loader=loader)


@pytest.mark.parametrize("options", [{"flush": "thread"}, "thread"], ids=type)
def test_options_that_are_none_are_refused(options: object, tmp_path: Path) -> None:
    with raises(laststep.UsageError, "options", found=True):
        laststep.Checkpointer(tmp_path / "run", s={"a": 1}, options=options)


@pytest.mark.parametrize("name", ["capture", "flush", "on_busy", "compare_replicas"])
def test_a_wrong_value_of_a_setting_is_not_called_an_unknown_setting(
    name: str, tmp_path: Path
) -> None:
    with raises(laststep.UsageError, name, found="'gpu'", expected="'") as caught:
        laststep.Checkpointer(tmp_path / "run", s={"a": 1}, **as_keywords({name: "gpu"}))
    assert_tells_all(caught.value)


def test_unknown_policies_for_another_number_of_ranks_are_refused() -> None:
    for policy in ("derive", "kep"):
        with raises(laststep.UsageError, "when_ranks_change", found=repr(policy)) as caught:
            laststep.PerRank([1], when_ranks_change=policy)
        assert_tells_all(caught.value)


def test_an_item_may_be_called_much_like_a_setting(tmp_path: Path) -> None:
    items = {"writer": {"a": 1}, "kept": [1], "item": torch.zeros(1)}
    with laststep.Checkpointer(
        tmp_path / "run", options=laststep.Options(flush="thread"), **items
    ) as checkpointer:
        assert repr(checkpointer) == f"<Checkpointer of {tmp_path}/run: writer, kept, item>"
    assert repr(checkpointer).endswith(", closed>")


@pytest.mark.parametrize("kind", [nn.Linear, torch.optim.SGD, dict, laststep.StateProvider])
def test_a_class_in_the_place_of_an_object_is_refused(kind: type, run_folder: Path) -> None:
    with raises(laststep.UsageError, "'x'", found=repr(kind), remedy=f"{kind.__name__}(…)"):
        laststep.Checkpointer(run_folder, x=kind)
    with (
        laststep.Checkpointer(
            run_folder, x={"kind": kind}, options=laststep.Options(flush="thread")
        ) as checkpointer,
        raises(laststep.UsageError, where="kind of item 'x'"),
    ):
        checkpointer.save(0)  # it is a value there, which only a pickle could hold


def test_a_place_that_holds_no_files_is_told_as_such() -> None:
    for act in (
        lambda: laststep.save({"n": 1}, "/proc/one"),
        lambda: (
            laststep.Checkpointer("/proc/run", x={"n": 1}, options=laststep.Options(flush="thread"))
            .save(0)
            .wait()
        ),
    ):
        with raises(laststep.StorageError, where="/proc/", found="ENOENT"):
            act()


class OwnStr(str):
    __slots__ = ()


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError


def test_names_may_be_of_a_class_that_derives_from_str(tmp_path: Path) -> None:
    state = {"n": 1}
    keep = laststep.Keep(best=1, metric=OwnStr("loss"))
    with laststep.Checkpointer(tmp_path / "run", items={OwnStr("s"): state}, keep=keep) as ckpt:
        ckpt.save(0, metrics={OwnStr("loss"): 1.0}).wait()
        for only in (OwnStr("s"), [OwnStr("s")], np.str_("s")):
            state["n"] = 2
            assert ckpt.restore(only=only).metrics == {"loss": 1.0}
            assert state == {"n": 1}


def test_what_cannot_be_shown_is_refused_all_the_same(tmp_path: Path) -> None:
    odd = Unshowable()
    with laststep.Checkpointer(
        tmp_path / "run", s={"n": 1}, options=laststep.Options(flush="thread")
    ) as ckpt:
        for call in (
            lambda: ckpt.save(odd),
            lambda: ckpt.restore(only=odd),
            lambda: ckpt.restore(only=[odd]),
            lambda: ckpt.save(0, metrics={odd: 1}),
            lambda: ckpt.wait(odd),
            lambda: laststep.Keep(last=odd),
            lambda: laststep.PerRank([1], when_ranks_change=odd),
            lambda: laststep.Checkpointer(tmp_path / "b", s={"n": 1}, keep=odd),
            lambda: laststep.Checkpointer(tmp_path / "b", items={odd: {"n": 1}}),
        ):
            with pytest.raises(laststep.UsageError, match=r"a (Unshowable|list)\b"):
                call()


@pytest.mark.parametrize(
    "make",
    [
        lambda: laststep.Keep(last=2**70),
        lambda: laststep.Keep(best=1, metric=""),
        lambda: laststep.Checkpointer("nowhere", s={"n": 1}, host_memory_bytes=2**70),
    ],
    ids=["last", "metric", "memory"],
)
def test_what_can_be_no_such_number_or_name_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(laststep.UsageError) as caught:
        make()
    assert_tells_all(caught.value)


@pytest.mark.parametrize(
    "keywords",
    [
        {"evry": 10},
        {"every": 0},
        {"keep": 3},
        {"options": {"flush": "thread"}},
        {"preemption": "yes"},
        {"compression": {"model": "zip"}},
        {"items": [1]},
        {"host_memory_bytes": 5},
    ],
    ids=str,
)
def test_adapters_can_check_keywords_before_there_is_a_checkpointer(
    keywords: dict[str, object],
) -> None:
    with pytest.raises(laststep.UsageError):
        check_early(keywords)


def test_good_keywords_pass_whatever_the_items_are() -> None:
    check_early(
        {
            "every": 10,
            "keep": laststep.Keep(last=2),
            "items": {"ema": {}},
            "compression": {"model": "none", "*": "adaptive"},
            "options": laststep.Options(lossy={"optimizer/*exp_avg": "bf16"}),
            "more": nn.Linear(1, 1),
        }
    )


def test_a_run_below_a_file_is_refused_with_a_remedy_that_fits(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("")
    for path in (tmp_path / "tasks.py", tmp_path / "tasks.py" / "run"):
        with raises(laststep.StorageError, found="tasks.py", remedy="choose a folder") as raised:
            laststep.save({"n": 1}, path / "one")
        assert "right to write" not in raised.value.remedy
