"""Text for the main job: any folder of files, read as bytes."""

from __future__ import annotations

from lightning_ptm.data.text import TextBytes

__all__ = ["TextBytes"]
