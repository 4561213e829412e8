"""The version of the package, read here by the build and by everything else."""

from __future__ import annotations

VERSION = "0.1.0"
