"""A machine as Linux tells of it, in files of a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_ptm.runtime.machine import cgroup, machine

MakeMachine = Callable[[dict[str, str]], None]
"""Makes files, with their texts."""


def make_in(root: Path, monkeypatch: pytest.MonkeyPatch) -> MakeMachine:
    """Makes this machine's files be read below `root`, which is empty."""
    for module in (machine, cgroup):
        monkeypatch.setattr(module, "Path", lambda path: root / str(path).lstrip("/"))

    def make(files: dict[str, str]) -> None:
        for name, text in files.items():
            place = root / name.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)

    return make
