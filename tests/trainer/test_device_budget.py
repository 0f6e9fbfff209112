"""What a fit wants of the device's memory before a batch, from measurements and shapes."""

from __future__ import annotations

import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_ptm.config import Settings
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.planning.activation_choice import Handling
from lightning_ptm.runtime.engine import engine
from lightning_ptm.runtime.engine.activation_peak import ActivationPeak
from lightning_ptm.runtime.ranks.barriers import STEP_ENDS, BarrierReason
from lightning_ptm.terms import Phase, Tier
from lightning_ptm.trainer import relayout
from lightning_ptm.trainer.device_budget import DeviceBudget, Wanted

MIB = 1 << 20


class Device(CpuBackend):
    """A device whose steps have taken what a test says."""

    has_own_memory = True
    peak = stays = 0

    def peak_outside_region(self, region_bytes: int) -> int:
        return Device.peak

    def bytes_outside_region(self, region_bytes: int) -> int:
        return Device.stays


def begun() -> DeviceBudget:
    """The budget when a layout without pages and gradients has begun."""
    peak = ActivationPeak(Device(), 0, 0, ())
    budget = DeviceBudget(Device(), lambda: peak, follows=True)
    budget.begin_layout(0, 0)
    return budget


@pytest.fixture(autouse=True)
def nothing_taken() -> None:
    Device.peak = Device.stays = 0


def batch(samples: int, length: int) -> dict[str, Any]:
    return {"tokens": torch.empty(samples, length, dtype=torch.int8), "more": [torch.empty(samples)]}


def followed(samples: int, length: int, step_bytes: int) -> DeviceBudget:
    """The budget after a first step with such a batch."""
    budget = begun()
    assert budget.before_batch(batch(samples, length), 0, 7) is Wanted.NOTHING
    assert budget.before_batch(batch(samples, length), 2, 8) is Wanted.FOLLOW
    Device.peak, Device.stays = step_bytes + MIB, MIB
    assert budget.follow(varies=False) == step_bytes + MIB
    assert budget.beside_bytes == MIB + step_bytes + step_bytes // 32
    return budget


def test_a_budget_that_is_set_or_in_ram_follows_nothing() -> None:
    assert not DeviceBudget(Device(), lambda: None, follows=False).follows
    assert not DeviceBudget(CpuBackend(), lambda: None, follows=True).follows


def test_a_layout_that_stays_is_no_longer_measured_by_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks: list[None] = []
    monkeypatch.setattr(Device, "next_peak", lambda device: ticks.append(None))
    peak = ActivationPeak(Device(), 0, 0, ())
    budget = DeviceBudget(Device(), lambda: peak, follows=True)
    budget.begin_layout(0, 0)
    peak.tick()
    assert len(ticks) == 1
    budget.follow(varies=False)
    budget.stay()
    peak.tick()
    assert len(ticks) == 1


def test_batches_that_are_not_larger_change_nothing() -> None:
    budget = followed(8, 512, 64 * MIB)
    for samples, length in ((8, 512), (1, 512), (8, 17), (3, 3)):
        assert budget.before_batch(batch(samples, length), 3, 9) is Wanted.NOTHING


@pytest.mark.parametrize(("samples", "length"), [(9, 512), (8, 560), (4, 1024)])
def test_before_a_larger_batch_pages_take_the_least(samples: int, length: int) -> None:
    """Twice the length may take four times the memory, so half the samples do not make up for it."""
    budget = followed(8, 512, 64 * MIB)
    assert budget.before_batch(batch(samples, length), 3, 9) is Wanted.LEAST
    budget.fall(9)
    budget.begin_layout(0, 0)
    assert budget.beside_bytes is None
    assert budget.before_batch(batch(8, 512), 1, 10) is Wanted.FOLLOW
    Device.peak = 71 * MIB
    budget.follow(varies=False)
    assert budget.beside_bytes == MIB + 70 * MIB + 70 * MIB // 32 + 70 * MIB // 4
    assert budget.before_batch(batch(samples, length), 1, 11) is Wanted.NOTHING


def test_a_step_of_several_batches_is_traced_as_a_whole() -> None:
    """Room is left for one that is longer than all before, if batches differ: it may come while gradients are pending."""
    for lengths, more in (((512, 512), 0), ((512, 400), 64), ((400, 512), 64)):
        Device.peak = Device.stays = 0
        budget = begun()
        for backwards, length in enumerate(lengths):
            assert budget.before_batch(batch(8, length), backwards, 7) is Wanted.NOTHING
        Device.peak, Device.stays = 65 * MIB, MIB
        assert budget.before_batch(batch(8, 512), 2, 8) is Wanted.FOLLOW
        budget.follow(varies=False)
        assert budget.beside_bytes == MIB + 66 * MIB + more * MIB


def test_a_step_without_a_backward_shows_nothing() -> None:
    budget = begun()
    budget.before_batch(batch(8, 512), 0, 0)
    assert budget.before_batch(batch(8, 512), 0, 1) is Wanted.NOTHING
    assert budget.before_batch(batch(8, 512), 1, 2) is Wanted.FOLLOW


def test_a_step_is_traced_once_activations_are_handled_as_in_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, given, begins = begun(), batch(4, 64), list[bool]()
    begin = ActivationPeak.begin
    monkeypatch.setattr(
        ActivationPeak, "begin", lambda peak, by_tick: (begins.append(by_tick), begin(peak, by_tick=by_tick))
    )
    first, later = {1: Handling.HOST, 2: Handling.HOST}, {1: Handling.HOST}
    assert budget.before_batch(given, 0, 7) is Wanted.NOTHING
    assert budget.before_batch(given, 2, 8, handlings=first, settled=False) is Wanted.NOTHING
    assert budget.before_batch(given, 4, 9, handlings=first, settled=False) is Wanted.NOTHING and not begins
    assert budget.before_batch(given, 6, 10, handlings=later) is Wanted.NOTHING and begins == [True]
    assert budget.before_batch(given, 8, 11, handlings=later) is Wanted.FOLLOW and budget.handlings is None
    budget.follow(varies=False)
    assert budget.handlings == later
    budget.fall(11)
    assert budget.handlings is None


def test_what_could_not_be_done_is_wanted_again() -> None:
    budget = followed(8, 512, 64 * MIB)
    assert budget.before_batch(batch(9, 512), 3, 9) is Wanted.LEAST
    budget.postpone()
    assert budget.before_batch(batch(8, 512), 4, 9) is Wanted.LEAST
    budget.fall(10)
    budget.begin_layout(0, 0)
    budget.before_batch(batch(8, 512), 1, 11)
    budget.follow(varies=False)
    assert budget.before_batch(batch(8, 512), 2, 12) is Wanted.NOTHING


def test_other_parameters_are_traced_anew_without_leaving_more() -> None:
    budget = followed(8, 512, 64 * MIB)
    budget.forget(9)
    budget.begin_layout(0, 0)
    assert budget.before_batch(batch(8, 512), 0, 9) is Wanted.NOTHING
    assert budget.before_batch(batch(8, 512), 1, 10) is Wanted.FOLLOW
    budget.follow(varies=False)
    assert budget.beside_bytes == MIB + 66 * MIB


def test_a_batch_of_another_kind_counts_as_larger() -> None:
    budget = followed(8, 512, 64 * MIB)
    assert budget.before_batch(torch.empty(1, 1, 1), 3, 9) is Wanted.LEAST


def test_evaluations_count_apart() -> None:
    budget = followed(8, 512, 64 * MIB)
    assert budget.before_evaluation(batch(8, 512)) is Wanted.NOTHING
    assert budget.before_evaluation(batch(32, 512)) is Wanted.LEAST
    budget.fall(9)
    budget.follow(varies=False)
    assert budget.before_evaluation(batch(32, 512)) is Wanted.NOTHING
    assert budget.before_batch(batch(32, 512), 3, 9) is Wanted.LEAST, "it was not trained on"


@pytest.mark.parametrize("seed", range(5))
def test_random_lengths_fail_nowhere_and_settle(seed: int) -> None:
    """In 200 random batches, none takes more than pages have left, and the run is laid out again a few times."""
    random_number = random.Random(seed)
    budget, layouts = begun(), 0
    Device.stays = MIB
    for steps in range(200):
        samples, length = random_number.randint(1, 16), random_number.randint(16, 1024)
        wanted = budget.before_batch(batch(samples, length), 1 if steps else 0, steps)
        if wanted is Wanted.LEAST:
            budget.fall(steps)
            budget.begin_layout(0, 0)
        elif wanted is Wanted.FOLLOW:
            budget.follow(varies=False)
        layouts += wanted is not Wanted.NOTHING
        taken = MIB + samples * length * (MIB // 64 + length * 8)
        assert budget.beside_bytes is None or taken <= budget.beside_bytes
        Device.peak = taken if wanted is not Wanted.NOTHING else max(Device.peak, taken)
    assert layouts <= 16


def test_flags_that_ranks_exchange_at_a_barrier_are_distinct() -> None:
    """What a rank wants and what it does go in one number."""
    flags = [*BarrierReason, *(each for each in Wanted if each), engine._TRACES, engine._CHANGED_BUFFERS]
    assert len({int(each) for each in flags}) == len(flags)
    assert sum(flags) < STEP_ENDS and all(int(each).bit_count() == 1 for each in flags)


def test_after_units_that_no_traced_step_has_called_pages_take_the_least_twice_at_most() -> None:
    budget = followed(8, 512, 64 * MIB)
    assert budget.before_batch(batch(8, 512), 3, 9, {0, 1}) is Wanted.LEAST
    assert budget.before_batch(batch(8, 512), 4, 10, {0, 1}) is Wanted.NOTHING
    assert budget.before_batch(batch(8, 512), 5, 11, {2}) is Wanted.LEAST
    assert budget.before_batch(batch(8, 512), 6, 12, {3}) is Wanted.NOTHING


def test_where_gradients_would_have_no_room_pages_get_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not the least."""
    left: list[int] = []
    run: Any = SimpleNamespace(
        engine=SimpleNamespace(
            blueprint=SimpleNamespace(units=(), placement=SimpleNamespace(sums_gradients=True), lock_free=None),
            changes=SimpleNamespace(frozen_as_trained=nullcontext),
            barriers=SimpleNamespace(all_agree=bool),
        ),
        device_budget=SimpleNamespace(beside_bytes=100, leave=left.append, gradients_read=False),
        builder=SimpleNamespace(
            precision=SimpleNamespace(steps_after_each_pass=lambda module: True),
            settings=Settings(),
            decided_ahead=lambda *_: SimpleNamespace(budget={Tier.DEVICE: 3200}),
        ),
        paged_optimizers=list,
        cut=None,
        module=None,
    )

    def decided_beside(decided: Any, beside_bytes: int, agree: Any, below_bytes: Any, **_: Any) -> Any:
        assert below_bytes is None  # gradients are summed over micro-batches
        made = decided(beside_bytes)
        return (made, beside_bytes) if beside_bytes > 200 else None

    monkeypatch.setattr(relayout, "decided_beside", decided_beside)
    monkeypatch.setattr(relayout, "has_runs_of_pages", lambda *_: True)
    assert relayout._decided_ahead(run) is not None and left == [100, 200, 300, 300]


def test_units_that_no_traced_step_has_called_have_room_for_what_others_of_their_class_keep() -> None:
    class Expert: ...

    class Block: ...

    peak = ActivationPeak(Device(), 0, 0, ())
    budget = DeviceBudget(Device(), lambda: peak, follows=True)
    budget.begin_layout(0, 0)
    for unit, kept in ((1, 2), (2, 5), (3, 40), (None, 0)):
        peak.tick(unit, None if unit is None else Phase.FORWARD)
        Device.stays += kept * MIB
    Device.peak, Device.stays = 64 * MIB, 0
    budget.follow(varies=False, classes={1: Expert, 2: Expert, 3: Block, 4: Expert, 5: Expert, 6: int})
    assert budget.beside_bytes == (64 + 2 + 2 * 5) * MIB


def test_no_smaller_device_memory_is_proposed_where_pages_have_the_least() -> None:
    budget = begun()
    budget.begin_layout(4000, 4 << 10)
    assert "device_memory=" not in budget.explain() and "recompute='all'" in budget.explain()
    budget.follow(varies=False)
    budget.begin_layout(4000, 4 << 10)
    assert "device_memory=" not in budget.explain()
    budget.begin_layout(1 << 20, 2 << 20)
    assert "set device_memory='4KiB' (as in the first step)" in budget.explain()


def test_gradients_have_room_below_the_peak_only_if_each_pass_of_the_loss_has_its_step() -> None:
    """And if units have the numbers that they had when the peaks were measured."""

    def measured(passes: int = 1) -> DeviceBudget:
        peak = ActivationPeak(Device(), 0, 0, ())
        budget = DeviceBudget(Device(), lambda: peak, follows=True)
        budget.begin_layout(0, 0)
        budget.before_batch(batch(8, 512), 0, 7)
        Device.peak, Device.stays = 65 * MIB, MIB
        peak.tick()
        Device.peak = 9 * MIB
        peak._waiting._before = {1}
        peak.passes = passes
        budget.before_batch(batch(8, 512), 2, 8)
        budget.follow(varies=False)
        return budget

    assert measured().below_peak() == {frozenset(): 0, frozenset({1}): 56 * MIB}
    assert measured(passes=2).below_peak() is None
    unfrozen, larger = measured(), measured()
    unfrozen.forget(8)
    larger.fall(8)
    assert unfrozen.below_peak() is None and larger.below_peak() is not None
    accumulated = measured()
    accumulated.before_batch(batch(8, 512), 2, 8)
    assert accumulated.below_peak() is None
