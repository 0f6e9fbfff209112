"""One policy of what waits for which job, two drivers: buffers of gradients and pages, and the forecast's clock.

The forecast's seconds decide when jobs end and when compute reads. The buffers go through the same, and decide the same.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_lock_free_buffers import NUMEL, gradient
from test_weight_prediction import Counts, WithPlaces

from lightning_ptm.forecasting.shared_cores import SharedCoreFlat, SharedCoreRates, SharedCores, _Flat, _Job
from lightning_ptm.planning import version_policy
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.trace import Trace, sequential_trace
from lightning_ptm.planning.version_policy import GradientAct, GradientEvent

CHUNK = 100


class Both(SharedCores):
    """A forecast, and beside it the buffers of a run, to which happens what happens to the forecast."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        sizes = [chance.choice([1, 4, 10]) for _ in range(chance.randint(1, 8))]
        spares, room = chance.randint(1, 4), chance.choice([2, 8, 30])
        can_predict, bound = seed % 2 == 0, chance.choice([0, 1, 2, 4, 16])
        work = sum(sizes) * CHUNK
        rates = SharedCoreRates(
            update_bytes_per_s=28 * work / chance.choice([0.1, 1.0, 5.0]),
            loss=1.0,
            learn_numel_per_s=10.0 * work,
            prediction_numel_per_s=10.0 * work,
            sum_bytes_per_s=60.0 * work,
            disk_bytes_per_s=24 * work / chance.choice([0.01, 2.0, 20.0, 100.0]),
        )
        kind = (NUMEL, torch.bfloat16)
        super().__init__(
            [SharedCoreFlat(unit, CHUNK * size, 2, 12, True, kind, can_predict) for unit, size in enumerate(sizes)],
            {kind: spares},
            rates,
            chunk_numel=CHUNK,
            staging=room,
            max_staleness=bound,
        )
        self.bench = WithPlaces(spares=spares, room=room, sizes=sizes, can_predict=can_predict)
        self.planned: list[GradientAct] = []
        self.done: list[GradientAct] = []
        self.waiting.on_decision = self.planned.append
        self.bench.buffers.policy.on_decision = self.done.append
        units = [
            UnitSpec(f"unit {unit}", (ParameterSpec(f"weight {unit}", (64,), "bfloat16", 2, True, 0),))
            for unit in range(len(sizes))
        ]
        ticks = sequential_trace(build_layout(units, page_size=1 << 16, world_size=1)).ticks
        self.run(Trace(tuple(replace(tick, seconds=1.0) for tick in ticks)), micro_batches=chance.randint(1, 2))

    def _offer(self, flat: _Flat, step: int) -> None:
        self.bench.buffers.offer(self.bench.flats[flat.place], gradient(step))
        super()._offer(flat, step)

    def _prioritize(self, flat: _Flat, needed: int) -> None:
        self.bench.buffers.prioritize(self.bench.flats[flat.place], needed)
        super()._prioritize(flat, needed)

    def _adopt(self, flat: _Flat) -> None:
        self.bench.read(self.bench.flats[flat.place])
        super()._adopt(flat)

    def _finish(self, job: _Job) -> None:
        (real,) = (real for real in self.bench.jobs if real.flat is self.bench.flats[job.flat.place])
        assert len(real.contribution.origins) == job.begun.steps
        self.bench.jobs.remove(real)
        self.bench.buffers.finish(real.flat, Counts() if job.begun.ahead else None)
        super()._finish(job)


def test_the_buffers_of_a_run_decide_what_the_forecast_does() -> None:
    heard = set()
    for seed in range(60):
        both = Both(seed)
        assert both.done == both.planned != []
        heard |= {(act.event, act.is_predicted, act.steps > version_policy.REACH) for act in both.done}
    assert {doing for doing, _, _ in heard} == set(GradientEvent)
    assert (GradientEvent.PUBLISHED, True, False) in heard and (GradientEvent.ADDED, True, False) in heard
    assert (GradientEvent.BEGINS, False, True) in heard


@functools.cache
def planned_with_the_constants_as_they_are() -> list[Any]:
    return [Both(seed).planned for seed in range(60)]


@pytest.mark.slow_unless("REACH-5", "_BETWEEN-1")
@pytest.mark.parametrize(("constant", "value"), [("REACH", 1), ("REACH", 5), ("_BETWEEN", 1), ("_BETWEEN", 4)])
def test_a_constant_that_changes_changes_both(monkeypatch: pytest.MonkeyPatch, constant: str, value: int) -> None:
    before = planned_with_the_constants_as_they_are()
    monkeypatch.setattr(version_policy, constant, value)
    after = [Both(seed) for seed in range(60)]
    assert all(both.done == both.planned for both in after)
    assert [both.planned for both in after] != before
