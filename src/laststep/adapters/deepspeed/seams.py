"""What of DeepSpeed the adapter looks at, and the version that it was tested with."""

from __future__ import annotations

import functools

from laststep.adapters import flat_state
from laststep.adapters.framework import Framework

FRAMEWORK = Framework(package="deepspeed", extra="deepspeed", first="0.19", last="0.19")
TESTED = "DeepSpeed 0.19.8"

need = functools.partial(flat_state.need, tested=TESTED)
"""An attribute of one of its objects, or `UsageError`."""
