"""Tables of what adapters use, compared with the installed frameworks."""

from __future__ import annotations

import importlib
import pprint
from typing import TYPE_CHECKING

import pytest

from expect import warned
from laststep.adapters.sources import changed, digests

if TYPE_CHECKING:
    from laststep.adapters.framework import Framework

ADAPTERS = {
    "accelerate": "laststep.accelerate.attached",
    "deepspeed": "laststep.deepspeed.items",
    "lightning": "laststep.lightning",
    "megatron.core": "laststep.megatron",
    "ray": "laststep.ray",
    "torchtitan": "laststep.torchtitan",
    "transformers": "laststep.hf",
}

pytestmark = pytest.mark.filterwarnings("ignore")  # importing frameworks warns


@pytest.fixture(params=ADAPTERS)
def framework(request: pytest.FixtureRequest) -> Framework:
    pytest.importorskip(request.param, reason=f"needs {request.param}")
    found: Framework = importlib.import_module(ADAPTERS[request.param]).FRAMEWORK
    return found


def is_newest(framework: Framework) -> bool:
    return f"{framework.version}.".startswith(f"{framework.newest}.")


def test_the_table_agrees_with_the_newest_tested_release(framework: Framework) -> None:
    if not is_newest(framework):  # an older one may lack what the table names
        pytest.skip(f"needs {framework.package} {framework.newest}, whose digests are recorded")
    now = digests(framework.uses)
    assert all(all(names.values()) for names in now.values()), changed(framework.uses)
    assert now == framework.uses, f"once it is tested, the new table is\n{pprint.pformat(now)}"


def test_a_newer_release_that_changes_nothing_is_accepted(
    framework: Framework, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not is_newest(framework):
        pytest.skip(f"needs {framework.package} {framework.newest}, whose digests are recorded")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "99.1.0")
    framework.check()
    assert warned(caplog, f"laststep.{framework.extra}", "99.1.0")
