"""Lock-free updates on the cores that compute: what they take of a step, and how often they come round."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning.models import even_layout

from lightning_ptm.forecasting.shared_cores import SharedCoreFlat, SharedCoreRates, SharedCores, SharedCoreTiming
from lightning_ptm.forecasting.update_extras import UpdateExtra
from lightning_ptm.planning.trace import Trace, sequential_trace

UNITS = 4
NUMEL = 1000
CHUNK = 100
TRACE = Trace(tuple(replace(tick, seconds=1.0) for tick in sequential_trace(even_layout([1] * UNITS)).ticks))
COMPUTE_S = float(len(TRACE.ticks))
FREE = SharedCoreRates(
    update_bytes_per_s=1e30,
    loss=1.0,
    learn_numel_per_s=None,
    prediction_numel_per_s=None,
    sum_bytes_per_s=1e30,
    disk_bytes_per_s=1e30,
)
PASS_BYTES = UNITS * NUMEL * 28
DISK_BYTES = UNITS * NUMEL * 24


def steps(
    rates: SharedCoreRates = FREE,
    *,
    spares: int = UNITS + 1,
    max_staleness: int = 16,
    forecast: bool = False,
    extra: UpdateExtra | None = None,
) -> SharedCoreTiming:
    in_pages = 12 if extra is None else 12 - extra.more_bytes // NUMEL
    flats = [SharedCoreFlat(unit, NUMEL, 2, in_pages, True, "a kind", forecast, extra=extra) for unit in range(UNITS)]
    run = SharedCores(
        flats,
        {"a kind": spares},
        rates,
        chunk_numel=CHUNK,
        staging=8,
        max_staleness=max_staleness,
    )
    return run.run(TRACE)


def test_updates_that_take_no_time_leave_a_step_to_its_compute() -> None:
    found = steps()
    assert found.seconds == pytest.approx(COMPUTE_S)
    assert found.updates == pytest.approx(1.0)
    assert found.stall_s == 0.0


@pytest.mark.parametrize("loss", [0.5, 1.0, 2.0])
def test_arithmetic_beside_compute_makes_it_longer(loss: float) -> None:
    found = steps(replace(FREE, update_bytes_per_s=PASS_BYTES / 1.0, loss=loss))
    assert found.updates == pytest.approx(1.0)
    assert found.seconds == pytest.approx(COMPUTE_S + loss)


def test_a_forecast_is_learned_beside_compute_and_added_by_it() -> None:
    learned = steps(replace(FREE, learn_numel_per_s=UNITS * NUMEL / 1.0), forecast=True)
    assert learned.seconds == pytest.approx(COMPUTE_S + 1.0)
    added = steps(replace(FREE, prediction_numel_per_s=UNITS * NUMEL / 1.0), forecast=True)
    assert COMPUTE_S < added.seconds <= COMPUTE_S + 2.0


def test_encoded_states_are_computed_in_fp32_and_coded_beside_compute() -> None:
    """A pass takes a second, and two more for coding; the disk moves what is in pages."""
    rates = replace(FREE, update_bytes_per_s=PASS_BYTES / 1.0)
    halves = UpdateExtra(more_bytes=4 * NUMEL)
    assert steps(rates, extra=halves).seconds == pytest.approx(COMPUTE_S + 1.0)
    coded = steps(rates, extra=replace(halves, cpu_s=2.0 / UNITS))
    assert coded.seconds == pytest.approx(COMPUTE_S + 3.0)
    slow = replace(FREE, disk_bytes_per_s=DISK_BYTES / (5 * COMPUTE_S))
    assert steps(slow, extra=halves).updates > 1.2 * steps(slow).updates


def test_updates_that_are_slower_than_steps_take_several_gradients_at_once() -> None:
    """A pass of five steps' time: each flat is updated less than every second step, and compute does not wait."""
    found = steps(replace(FREE, disk_bytes_per_s=DISK_BYTES / (5 * COMPUTE_S)))
    assert found.updates == pytest.approx(0.2, rel=0.3)
    assert found.seconds == pytest.approx(COMPUTE_S)
    assert found.stall_s == 0.0


def test_compute_waits_for_what_it_may_not_lack() -> None:
    slow = replace(FREE, disk_bytes_per_s=DISK_BYTES / (5 * COMPUTE_S))
    synchronous, one, many = (steps(slow, max_staleness=bound) for bound in (0, 1, 16))
    assert synchronous.seconds >= one.seconds > many.seconds
    assert synchronous.seconds >= 5 * COMPUTE_S
    assert one.stall_s == pytest.approx(one.seconds - COMPUTE_S)


def test_without_spare_pages_fewer_updates_are_made() -> None:
    """In a backward pass compute adopts nothing, so pages for new versions do not come back before its end."""
    rates = replace(FREE, update_bytes_per_s=PASS_BYTES / 2.0)
    few, many = steps(rates, spares=2), steps(rates)
    assert few.updates < 0.9 * many.updates
    assert few.seconds == pytest.approx(many.seconds)  # two steps' gradients are still two steps
