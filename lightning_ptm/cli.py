"""The console script: `lightning-ptm`, and `python main.py` from a checkout."""

from __future__ import annotations

from lightning_ptm.command_line import main

__all__ = ["main"]
