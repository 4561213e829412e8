"""A run in which a later laststep has written: refused by name, and nothing of it is harmed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import laststep
from expect import raises
from laststep.catalog import terms
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.codecs.digests import digest_text
from laststep.errors import UsageError
from laststep.format.manifest import seal
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

Saved = Callable[..., list[str]]

LATER = {"format": 9, "laststep": "7.1.0", "new": [1]}
REFUSAL = r"\b9\b.*7\.1\.0.*7\.1\.0"
"""The format that was found, who wrote it, and the version to upgrade to."""


def sealed_epoch(content: dict[str, object]) -> bytes:
    text = json.dumps(content).encode()
    return b'{"digest":"%s","term":%s}' % (digest_text(text).encode(), text)


def write_later_manifest(folder: Path) -> None:
    content = json.dumps({**LATER, "decision": "commit"}).encode()
    (folder / "manifest.json").write_bytes(seal(content))


def test_a_run_of_a_later_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps(LATER))
    for refused in (Run.open, Run.open_or_create):
        with pytest.raises(UsageError, match=REFUSAL):
            refused(DirectoryStore(tmp_path))


def test_a_run_of_a_later_format_that_names_nobody_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_bytes(b'{"format": 9, "shape": "other"}')
    with raises(UsageError, where="run.json", found="9", remedy="9"):
        Run.open(DirectoryStore(tmp_path))


def test_the_record_of_an_epoch_of_a_later_format_is_refused() -> None:
    with pytest.raises(UsageError, match=f"x.*{REFUSAL}"):
        terms.decode(sealed_epoch(dict(LATER)), term=7, where="x")


def test_nobody_claims_an_epoch_above_one_of_a_later_format(
    run: Run, saved: Saved, tmp_path: Path
) -> None:
    saved(1)
    (tmp_path / "run" / "terms" / "00000002.json").write_bytes(sealed_epoch(dict(LATER)))
    for continues in (None, (1, 1)):
        with pytest.raises(UsageError, match=REFUSAL):
            run.claim_term(continues)
    assert not (tmp_path / "run" / "terms" / "00000003.json").exists()


def test_nothing_is_deleted_beside_a_checkpoint_of_a_later_format(
    run: Run, saved: Saved, tmp_path: Path
) -> None:
    """It may need the files of others, in a way that this version does not know."""
    folders = saved(1, 2, 3, 4)
    keep = Keep(last=1, abandoned=False)
    assert [one.folder for one in plan_prune(run, keep).verdicts if not one.keep] == folders[:3]
    write_later_manifest(tmp_path / "run" / folders[1])
    verdicts = plan_prune(Run.open(run.store), keep).verdicts
    assert [one.folder for one in verdicts if one.keep] == folders
    assert any(folders[1] in reason for reason in verdicts[0].reasons)


def test_a_restore_does_not_pass_over_a_checkpoint_of_a_later_format(tmp_path: Path) -> None:
    state = {"value": 1}
    with laststep.Checkpointer(
        tmp_path / "run", state=state, options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.restore()
        for step in (1, 2):
            ckpt.save(step).wait()
        write_later_manifest(tmp_path / "run" / "step-00000002.1-2")
        with pytest.raises(UsageError, match=REFUSAL):
            ckpt.restore()
        assert ckpt.restore(1).step == 1
    with pytest.raises(UsageError, match=REFUSAL):
        laststep.open(tmp_path / "run").latest()
