"""Every way in which settings meet, on one rank: few cases quickly, all of them slowly."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from combinations import ALL, HOMES, SAVES, can_be, check
from covering import Case, few

from lightning_ptm.errors import ConfigError


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    before: Mapping[str, str] = dict(os.environ)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.slow_unless(
    "ram, host, host, lock-free, Adam, bf16-true, behind",
    "ram, host, disk, lock-free, RMSprop, 16-mixed, sharded",
    "tiers, auto, host, synchronous, RMSprop, 32-true, behind",
    "tiers, host, disk, lock-free, SGD, 64-true, full",
    "tiers, disk, auto, synchronous, Adam, 64-true, sharded",
    "tiers, auto, disk, lock-free, AdamW amsgrad, bf16-mixed, sharded",
    "ram, auto, disk, lock-free, Adam, bf16-true, sharded",
    "tiers, auto, auto, synchronous, SGD, bf16-mixed, behind",
    "tiers, auto, host, lock-free, two, 64-true, full",
    "tiers, disk, host, synchronous, SGD, 32-true, sharded",
    "ram, auto, host, lock-free, Adam, 16-mixed, full",
    "ram, host, auto, lock-free, Adam, bf16-mixed, full",
    "ram, auto, disk, synchronous, AdamW amsgrad, 64-true, behind",
    "ram, auto, host, lock-free, RMSprop, 64-true, full",
    "ram, host, host, synchronous, SGD, bf16-true, full",
    "tiers, auto, disk, lock-free, SGD with momentum, bf16-true, behind",
)
@pytest.mark.parametrize("case", few(ALL), ids=", ".join)
def test_few(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.diagonal
@pytest.mark.parametrize("saves", SAVES)
@pytest.mark.parametrize("masters", HOMES)
def test_pages_in_transit_where_the_optimizer_keeps_nothing(masters: str, saves: str, tmp_path: Path) -> None:
    check(("tiers", "disk", masters, "synchronous", "SGD", "32-true", saves), tmp_path)


def test_what_does_not_go_together_is_refused_before_it_begins(tmp_path: Path) -> None:
    case = ("tiers", "disk", "disk", "lock-free", "SGD", "32-true", "full")
    assert not can_be(case)
    with pytest.raises(ConfigError, match="offload_parameters"):
        check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=", ".join)
def test_all(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)
