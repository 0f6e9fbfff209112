"""Data modules for examples and benchmarks: text from any folder of files, read as bytes."""

from __future__ import annotations

from lightning_ptm.data.spans import SpanCorruption
from lightning_ptm.data.text import TextBytes

__all__ = ["SpanCorruption", "TextBytes"]
