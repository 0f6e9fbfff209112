"""The collectives of pages, on a fake CUDA device of each of two ranks: in order, and what they come to."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_process import ORDERS, need_fake_device, ranks_on_fake

NAMES = ("gather", "gather owned", "gather shares", "reduce", "reduce owned", "all to all", "sum")


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    need_fake_device()


@pytest.mark.timeout(300)
def test_each_is_behind_what_was_queued_and_before_what_is_queued_next() -> None:
    program = str(Path(__file__).with_name("collectives_program.py"))
    for done in ranks_on_fake(program, limit_s=280, world_size=2, **ORDERS["late"]):
        assert done.returncode == 0 and done.stdout == "".join(f"{name}: ok\n" for name in NAMES), (
            done.stdout + done.stderr[-6000:]
        )
