"""Where a rank is in the user's code. Knows frames of the stack, nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

_LIBRARIES = frozenset(
    {
        "contextlib",
        "lightning",
        "lightning_ptm",
        "lightning_utilities",
        "torch",
        "torchmetrics",
        "typing_extensions",  # around functions that torch has deprecated
    }
)


def whereabouts() -> str:
    """The innermost line of the calling thread that is none of the libraries'."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in _LIBRARIES:
            return f"at {Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "in no code of the user's"
