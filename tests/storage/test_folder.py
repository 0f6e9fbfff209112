from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_ptm.storage import folder


def test_a_link_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step=1.ckpt").mkdir()
    folder.link(tmp_path / "step=1.ckpt", tmp_path / "last.ckpt")
    before = sorted(os.listdir(tmp_path))

    def fails(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(folder.os, "replace", fails)
    with pytest.raises(OSError, match="no room"):
        folder.link(tmp_path / "step=1.ckpt", tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == before
