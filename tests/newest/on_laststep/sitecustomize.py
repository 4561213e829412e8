"""Put laststep's storage in the place of torch's own one, in every Python process that has this
folder on its PYTHONPATH: `FileSystemWriter` and `FileSystemReader` of torch.distributed.checkpoint
are then `laststep.dcp.Writer` and `Reader`.

PyTorch's tests spawn their ranks, which import the test's module anew, so a plugin of pytest would
reach only the first process.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

DCP = "torch.distributed.checkpoint"


class _AfterImport:
    """A finder that replaces the names once the package of DCP has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != DCP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            replace()

        spec.loader.exec_module = run_and_replace
        return spec


def replace() -> None:
    """Replace the names wherever DCP has imported them. Classes that were derived from torch's
    stay as they are."""
    from laststep.dcp import Reader, Writer

    for name, module in list(sys.modules.items()):
        if name == DCP or name.startswith(f"{DCP}."):
            for taken, ours in (("FileSystemWriter", Writer), ("FileSystemReader", Reader)):
                if hasattr(module, taken):
                    setattr(module, taken, ours)


sys.meta_path.insert(0, _AfterImport())
