"""Fixtures of the runtime's tests: a working folder that must stay empty, one thread per test process, a machine of files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from machine_of_files import MakeMachine, make_in


@pytest.fixture(autouse=True)
def empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing may be written where the user happens to stand."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []


@pytest.fixture(autouse=True, scope="module")
def one_thread_and_no_banners() -> Iterator[None]:
    """Tiny models are slower on several threads than on one (test_parity.py has a test with more). Other folders have tests
    of what is logged."""
    # Lightning sets the number of threads at the start of a run unless it finds this.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    logger = logging.getLogger("lightning.pytorch")
    threads, level = torch.get_num_threads(), logger.level
    torch.set_num_threads(1)
    logger.setLevel(logging.ERROR)
    yield
    torch.set_num_threads(threads)
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before
    logger.setLevel(level)


@pytest.fixture
def machine_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeMachine:
    """Makes the files of a machine that has no others."""
    return make_in(tmp_path / "root", monkeypatch)
