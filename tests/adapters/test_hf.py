"""What of the adapter for Hugging Face needs no framework."""

from __future__ import annotations

import importlib.util
import re

import pytest

import laststep


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is not None, reason="transformers is installed"
)
def test_without_transformers_the_error_says_what_brings_it() -> None:
    with pytest.raises(laststep.UsageError, match=re.escape("pip install 'laststep[hf]'")):
        _ = laststep.hf
