"""The version of the package; the build and the code both read it here."""

from __future__ import annotations

VERSION = "0.2.0"
