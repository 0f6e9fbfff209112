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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", few(ALL), ids=", ".join)
def test_few(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.covering(1)
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
