"""`page_size="auto"`: the smallest page that saturates the links (section 4.1 of the paper)."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.plain_loop import fit, tokens
from kit.stacks import Stack

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.config import DEFAULT_PAGE_BYTES
from lightning_ptm.errors import ConfigError
from lightning_ptm.memory import page_rates
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.page_rates import measured_rates, smallest_saturating

KIB, MIB = 1 << 10, 1 << 20
BATCHES = tokens(2)


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({}, None),
        ({"read": {256 * KIB: 1.0, MIB: 2.9, 4 * MIB: 3.1, 8 * MIB: 3.0}}, MIB),
        ({"read": {256 * KIB: 1.0, MIB: 2.7, 4 * MIB: 3.1, 8 * MIB: 3.0}}, 4 * MIB),
        ({"read": {MIB: 3.0, 4 * MIB: 3.0}, "write": {MIB: 1.0, 4 * MIB: 2.0}}, 4 * MIB),  # the slower link decides
        (
            {"read": {4 * MIB: 3.0, MIB: 1.0}, "write": {4 * MIB: 1.0, MIB: 3.0}},
            MIB,
        ),  # none suits both: the smaller
        (
            {"read": {KIB: 0.1, MIB: 2.0, 4 * MIB: 3.0}, "write": {KIB: 3.0, MIB: 2.0, 4 * MIB: 1.5}},
            MIB,
        ),  # the best of both
    ],
)
def test_the_smallest_page_that_saturates_every_link(rates: dict[str, dict[int, float]], best: int | None) -> None:
    assert smallest_saturating(rates) == best


def test_a_measurement_is_short_and_leaves_nothing(tmp_path: Path) -> None:
    before_s = time.process_time()
    rates = measured_rates([tmp_path], CpuBackend())
    assert time.process_time() - before_s < 2
    assert sorted(rates) == [f"read {tmp_path}", f"write {tmp_path}"]
    assert all(rate > 0 for by_size in rates.values() for rate in by_size.values())
    assert [found.name for found in tmp_path.iterdir()] == ["here"]  # which the tests have made
    assert measured_rates([], CpuBackend()) == {}


def test_copies_have_ended_when_their_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    zeros, seconds = torch.zeros, count()

    class Apart(CpuBackend):
        """A device whose copies end where somebody waits for them."""

        has_own_memory = True

        def synchronize(self) -> None:
            told.append("waits")

    def looks() -> float:
        told.append("looks")
        return float(next(seconds))

    monkeypatch.setattr(page_rates, "perf_counter", looks)
    monkeypatch.setattr(torch, "zeros", lambda size, dtype, pin_memory=False, device=None: zeros(size, dtype=dtype))
    assert sorted(page_rates.copy_rates(Apart(), MIB)) == ["device to host", "host to device"]
    # Begins, has had its time, ends.
    assert told == 2 * (page_rates._ROUNDS + 1) * ["waits", "looks", "looks", "waits", "looks"]


class Seen(L.Callback):
    def __init__(self) -> None:
        self.pages: list[int] = []

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.pages.append(trainer.strategy.engine.blueprint.layout.page_size)  # type: ignore[attr-defined]


def test_the_bits_are_those_of_that_number_as_a_setting(tmp_path: Path) -> None:
    def train(page_size: str | int) -> tuple[Any, int]:
        seen = Seen()
        strategy = AngelPTMStrategy(
            page_size=page_size, disk_path=str(tmp_path), offload_optimizer="disk", tuning={"staging_memory": "64MiB"}
        )
        return fit(Stack, BATCHES, strategy, callbacks=[seen]), seen.pages[0]

    measured, pages = train("auto")
    given, same = train(pages)
    assert same == pages and pages in (256 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
    measured.assert_equal(given)


def test_without_links_pages_are_as_large_as_ever() -> None:
    seen = Seen()
    fit(Stack, BATCHES, AngelPTMStrategy(page_size="auto"), callbacks=[seen])
    assert seen.pages == [DEFAULT_PAGE_BYTES]


def test_a_path_that_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    strategy = AngelPTMStrategy(page_size="auto", disk_path=str(tmp_path / "no" / "such"))
    with pytest.raises(ConfigError, match="does not exist"):
        fit(Stack, BATCHES, strategy)
