"""Predictions of one run on some nodes, with several values of its settings (`Question`).

Uses a run's own decisions: the strategy's request, `decide`, `make_plan`. Adds seconds to the ticks of the plan's trace
(forecasting/estimate.py) and replays it (forecasting/timing.py: steady). Allocates no parameter.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal

from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.commands.room import Sizes, activation_room, host_room, shortage
from lightning_ptm.config import Settings
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting.estimate import resized, sample_count, token_count
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.prediction import Prediction, homes_of, pages_by_use, tiers_of
from lightning_ptm.forecasting.rates import Activity
from lightning_ptm.forecasting.step_seconds import StepTime, exchanges, step_time, timed
from lightning_ptm.runtime.autograd.recompute import recomputed_around, recomputed_units
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.deciding.remedies import with_remedies
from lightning_ptm.runtime.engine.inspection import optimizers_in_pages
from lightning_ptm.runtime.engine.predicted_memory import predicted_memory
from lightning_ptm.terms import Mode, Tier

_DEVICE_SHARES = 16
"""Number of equal parts of a device's memory among which `device_memory` is searched."""


class Question:
    """Predictions for one config on some nodes, with several values of device_memory.

    Args:
        name: the config's name, or the model's.
        wanted: samples per rank; None: those of the run's batch.
        looked_at: see `Prediction`.
    """

    def __init__(
        self,
        run: PlannedRun,
        name: str,
        node: Node,
        nodes: int,
        wanted: Literal["auto"] | int | None,
        looked_at: str = "",
    ) -> None:
        # Configuration.
        self._run = run
        self._name = name
        self._looked_at = looked_at
        self._node = node
        self._nodes = nodes
        self._wanted = wanted
        # State.
        self._sizes: Sizes | None = None
        """The sizes of units, made for the first blueprint; units and ticks are the same for all."""
        self._rooms = (0, 0)
        """Bytes that pages leave to activations on the device and in RAM, in the last prediction."""

    def final(self, goal: str | None, record: list[Activity] | None) -> tuple[Prediction, Blueprint]:
        """The prediction, after a search if there is a goal, with the largest batch that would fit."""
        try:
            found, blueprint = self.search(goal, record) if goal is not None else self.answer(record)
        except CapacityError as error:
            alone = partial(decide, world_size=self._node.ranks_per_node * self._nodes)
            raise with_remedies(error, self._run.request, self._node.machine(), alone) from error
        if self._wanted == "auto":
            return dataclasses.replace(found, largest_batch=found.batch_size), blueprint
        assert self._sizes is not None
        try:
            largest = self._sizes.largest(*self._rooms)
        except ConfigError:  # a model may make its own batch, and accept no other size
            return found, blueprint
        return dataclasses.replace(found, largest_batch=largest), blueprint

    def search(self, goal: str, record: list[Activity] | None = None) -> tuple[Prediction, Blueprint]:
        """The prediction for the `best` device_memory or the `least` one; for the config's if none fits."""
        most, chosen = 0.0, None
        for settings, size in self._parts():
            try:
                found, _ = self.answer(None, settings)
            except CapacityError:
                continue
            if found.fits and found.samples_per_s > most:
                most, chosen = found.samples_per_s, (settings, size)
                if goal == "least":
                    break
        if chosen is None:
            return self.answer(record)
        found, blueprint = self.answer(record, chosen[0])
        return dataclasses.replace(found, chosen={"device_memory": chosen[1]}), blueprint

    def fits(self, *, search: bool) -> bool:
        """Returns whether the run fits on the machine. With `search`, tries several sizes of device memory, largest
        first."""
        for settings in [settings for settings, _ in reversed(self._parts())] if search else [None]:
            try:
                if self.answer(None, settings)[0].fits:
                    return True
            except CapacityError:
                continue
        return False

    def answer(self, record: list[Activity] | None, settings: Settings | None = None) -> tuple[Prediction, Blueprint]:
        """The prediction for these settings, by default the config's; see `forecast`."""
        run, node = self._run, self._node
        request = run.request if settings is None else dataclasses.replace(run.request, settings=settings)
        dtype = str(request.compute).removeprefix("torch.")
        node.flops_per_s(dtype)  # raises before the model is laid out
        world_size = node.ranks_per_node * self._nodes
        blueprint = decide(request, node.machine(), world_size)
        made = make_plan(blueprint, Mode.TRAIN, blueprint.planned(blueprint.trace))
        recomputed = recomputed_units(len(blueprint.units), request.settings.recompute_every)
        again = recomputed_around(blueprint.units, recomputed)
        sizes = self._sizes = self._sizes or Sizes(run, blueprint, recomputed)
        takes = predicted_memory(blueprint, made, blueprint.trace, again, sizes.ends_with(self._wanted))
        room = activation_room(blueprint, takes, node)
        ram_room = host_room(blueprint, node)
        self._rooms = room, ram_room
        samples = sizes.largest(room, ram_room) if self._wanted == "auto" else (self._wanted or sample_count(run.batch))
        ticks, works = sizes.at(max(samples, 1))
        peak, offloaded = max(ticks), sizes.offloaded(works)
        fits = samples > 0 and peak <= room and offloaded <= ram_room
        short = Tier.DEVICE if peak > room or offloaded <= ram_room else Tier.HOST
        step = StepTime(None, 0.0, f"memory for activations on the {short.name.lower()} tier")
        if fits:
            forward_s = [node.seconds(work, dtype) for work in works]
            trace = timed(blueprint.trace, forward_s, recomputed | again.keys(), node.unit_s or 0.0)
            rates, sent = node.rates(self._nodes, blueprint.holders), exchanges(blueprint, works, trace, again)
            step = step_time(blueprint, takes.plan, trace, node, rates, run.accumulate, offloaded, sent, record)
        lacking = (peak, room) if short is Tier.DEVICE else (offloaded, ram_room)
        reason = "" if fits else shortage(short, max(samples, 1), *lacking, node, unified=blueprint.unified)
        return (
            Prediction(
                config=self._name,
                hardware=node.name,
                nodes=self._nodes,
                ranks=world_size,
                tensor_ranks=run.tensor_ranks,
                numel=blueprint.layout.whole_numel,
                fits=fits,
                reason=reason,
                homes=homes_of(blueprint),
                tiers=tiers_of(blueprint, takes, node, {Tier.DEVICE: peak, Tier.HOST: offloaded}),
                pages=pages_by_use(blueprint),
                optimizers=optimizers_in_pages(blueprint),
                batch_size=samples,
                tokens=token_count(resized(run.batch, max(samples, 1))),
                accumulate=run.accumulate,
                flops=3 * sum(work.flops for work in works) * run.accumulate,
                timing=step.timing,
                seconds=step.seconds,
                binds=step.binds,
                steps_per_pass=None if blueprint.lock_free is None else max(1, blueprint.lock_free.max_staleness),
                chosen={},
                plan=made,
                page_ticks=takes.device_per_tick,
                activation_ticks=ticks,
                offloaded_bytes=offloaded,
                deepens=run.deepens,
                looked_at=self._looked_at,
                matrix_flops_per_s=node.compute_flops_per_s[dtype],
            ),
            blueprint,
        )

    def _parts(self) -> list[tuple[Settings, int]]:
        """Settings with each device_memory to search, smallest first."""
        sizes = [self._node.device_memory * part // _DEVICE_SHARES for part in range(1, _DEVICE_SHARES)]
        settings = self._run.request.settings
        return [(dataclasses.replace(settings, device_memory=size), size) for size in sizes]
