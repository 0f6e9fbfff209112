"""Predictions of one run on some nodes, with several values of its settings (`Question`).

Uses a run's own decisions: the strategy's request, `decide`, `make_plan`. Adds seconds to the ticks of the plan's trace
(forecasting/estimate.py) and replays it (forecasting/timing.py: steady). Allocates no parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch

from lightning_ptm.commands.garbage import collect_after_virtual_run
from lightning_ptm.commands.planned_run import PlannedRun
from lightning_ptm.commands.proposals import ACCUMULATE, ADAPTERS, BATCH, STAGING, Try, lasting, proposals
from lightning_ptm.commands.room import (
    WHOLE_MODEL,
    Activations,
    Sizes,
    Stage,
    chosen_handlings,
    rooms,
    shortage,
    waits_s,
)
from lightning_ptm.commands.stages import StageAnswer, together
from lightning_ptm.config import Settings
from lightning_ptm.errors import CapacityError, ConfigError, UsageError
from lightning_ptm.forecasting.estimate import check_stages, resized, sample_count
from lightning_ptm.forecasting.node import Node
from lightning_ptm.forecasting.pipeline import faster_blocks, most_graphs, stage_seconds
from lightning_ptm.forecasting.prediction import LARGEST_BATCH, DiskUse, Prediction, TierPlan
from lightning_ptm.forecasting.rates import Activity
from lightning_ptm.forecasting.step_seconds import (
    ActivationCopies,
    Halves,
    StepTime,
    exchanges,
    repeated,
    step_time,
    timed,
)
from lightning_ptm.memory.activation_disk import staging_bytes
from lightning_ptm.memory.endurance import DiskLife, rated_bytes
from lightning_ptm.planning.mesh import Axis, mesh_of
from lightning_ptm.planning.plan import Plan
from lightning_ptm.planning.trace import Trace
from lightning_ptm.runtime.autograd.recompute import recomputed_around, recomputed_units
from lightning_ptm.runtime.autograd.slices import slices_of
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.runtime.deciding.budgets import with_headroom
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.deciding.remedies import as_setting, remedies
from lightning_ptm.runtime.engine.activation_peak import planned_below_peak
from lightning_ptm.runtime.engine.inspection import optimizers_in_pages
from lightning_ptm.runtime.engine.predicted_memory import (
    SHARES_LEFT,
    PredictedMemory,
    decided_beside,
    gradients_at_peak,
    predicted_memory,
)
from lightning_ptm.terms import SEVERAL_CHUNKS, Kind, Mode, Phase, Tier
from lightning_ptm.trainer.disk_report import token_count

_DEVICE_SHARES = 16
"""Number of equal parts of a device's memory among which `device_memory` is searched."""


class Question:
    """Predictions for one run on some nodes, with several values of its settings.

    Args:
        name: the config's name, or the model's.
        wanted: samples per rank; None: those of the run's batch.
        adapted: makes the same run with everything frozen but adapters; None: it cannot have any.
        assumed, looked_at: see `Prediction`.
        disk_bytes: bytes of a disk; None: as the node says.
        endurance_s: see `Prediction`.
    """

    def __init__(
        self,
        run: PlannedRun,
        name: str,
        node: Node,
        nodes: int,
        wanted: Literal["auto"] | int | None,
        adapted: Callable[[], PlannedRun] | None = None,
        assumed: Sequence[str] = (),
        looked_at: str = "",
        disk_bytes: int | None = None,
        endurance_s: float | None = None,
    ) -> None:
        # Configuration.
        self._run = run
        self._name = name
        self._adapted = adapted
        self._assumed = tuple(assumed)
        self._looked_at = looked_at
        self._disk_bytes = disk_bytes
        self._endurance_s = endurance_s
        self._node = node
        self._nodes = nodes
        self._wanted = wanted
        # State.
        self._sizes: dict[int, Sizes] = {}
        """By stage, the sizes of units, made for the first blueprint; units and ticks are the same for all."""
        self._rooms: dict[int, dict[Tier, int]] = {}
        """By stage, bytes that pages leave to activations by tier, in the last prediction."""

    def final(self, goal: str | None, record: list[Activity] | None) -> tuple[Prediction, Blueprint | None]:
        """The prediction, after a search if there is a goal, with the largest batch that would fit; if it does not fit, with
        what would. No blueprint if states fit in no placement."""
        try:
            found, blueprint = self.search(goal, record) if goal is not None else self.answer(record)
        except CapacityError as error:
            return self._with_proposals(self._refused(error.shortage)), None
        found = dataclasses.replace(found, largest_batch=self.largest_batch(found), endurance_s=self._endurance_s)
        if found.wears_out:
            tried = lasting(self._try(), found, self._run.request.settings, self._endurance_s or 0.0)
            return dataclasses.replace(found, proposals=tried), blueprint
        return (found if found.fits else self._with_proposals(found)), blueprint

    def largest_batch(self, found: Prediction, most: int = LARGEST_BATCH) -> int | None:
        """The largest batch, of at most so many samples, that fits beside the pages of the last prediction on all stages,
        with all activations kept if they were in it; None: not known."""
        if self._wanted == "auto":
            return found.batch_size
        micro_batches, sizes = self._micro_batches, self._sizes.items()
        try:
            of_each = -(-most // micro_batches)
            return micro_batches * min(each.largest(self._rooms[at], of_each) for at, each in sizes)
        except ConfigError:  # a model may make its own batch, and accept no other size
            return None

    @property
    def _micro_batches(self) -> int:
        """Micro-batches that go through pipeline stages, of a batch; 1 without stages."""
        return self._run.request.settings.micro_batches

    def _micro_samples(self) -> int | None:
        """Samples of a micro-batch; None: as many as fit.

        Raises:
            ConfigError: micro-batches would not be equal.
        """
        if self._wanted == "auto":
            return None
        samples = self._wanted or sample_count(self._run.batch)
        if samples % self._micro_batches:
            raise ConfigError(
                f"micro_batches={self._micro_batches} does not divide a batch of {samples} samples into equal parts; use a "
                f"multiple of {self._micro_batches} samples, or other micro_batches"
            )
        return samples // self._micro_batches

    def _refused(self, reason: str) -> Prediction:
        run, node = self._run, self._node
        return Prediction(
            **self._facts(),
            numel=sum(parameter.numel() for parameter in run.model.parameters()),
            fits=False,
            reason=reason,
            batch_size=self._wanted if isinstance(self._wanted, int) else sample_count(run.batch),
            matrix_flops_per_s=node.compute_flops_per_s[_name_of(run.request.compute)],
            deepens=run.deepens,
        )

    def _facts(self) -> dict[str, Any]:
        """Returns the fields of a `Prediction` that need no decision, such as the numbers of ranks and parameters."""
        run, node = self._run, self._node
        return {
            "config": self._name,
            "hardware": node.name,
            "device": node.device,
            "precision": run.precision,
            "nodes": self._nodes,
            "mesh": mesh_of(run.request.settings, node.ranks_per_node * self._nodes),
            "accumulate": run.accumulate,
            "assumed": self._assumed,
            "looked_at": self._looked_at,
        }

    def _with_proposals(self, found: Prediction) -> Prediction:
        """The prediction of a run that does not fit, with what would."""
        node, disk = self._node, None
        if node.disk_memory and node.disk_read_bytes_per_s is not None and node.disk_write_bytes_per_s is not None:
            disk = DiskUse(0, node.disk_read_bytes_per_s, node.disk_write_bytes_per_s)
        tried = proposals(
            self._try(),
            self._run.request.settings,
            max(found.batch_size, 1),
            self._sizes_that_fit(found),
            disk,
            adapters=self._adapted is not None,
        )
        return dataclasses.replace(found, proposals=tried)

    def _try(self) -> Try:
        """Returns a function that predicts this run with changes."""
        adapted: list[PlannedRun] = []

        def attempt(changes: Mapping[str, Any]) -> tuple[Prediction, int | None]:
            values = dict(changes)
            samples = values.pop(BATCH, self._wanted)
            run = self._run
            if (staging := values.pop(STAGING, None)) is not None:
                values["tuning"] = dataclasses.replace(run.request.settings.tuning, staging_memory=staging)
            if values.pop(ADAPTERS, None) is not None and self._adapted is not None:
                adapted[:] = adapted or [self._adapted()]
                run = adapted[0]
            if (micro_batches := values.pop(ACCUMULATE, None)) is not None:
                run = run.accumulating(micro_batches)
            tried = Question(
                run.with_settings(**values), self._name, self._node, self._nodes, samples, disk_bytes=self._disk_bytes
            )
            seen, _ = tried.answer(None)
            return seen, None if seen.fits else tried.largest_batch(seen)

        return attempt

    def _sizes_that_fit(self, found: Prediction) -> list[dict[str, str]]:
        """Changes of one size of memory with which a run that does not fit may fit."""
        if found.tiers:  # only activations do not fit
            best = self._best("best") if self._node.has_own_memory and self._wanted != "auto" else None
            return [] if best is None else [{"device_memory": as_setting(best[1])}]
        alone = partial(decide, world_size=self._node.ranks_per_node * self._nodes)
        each = remedies(self._run.request, self._node.machine(), alone)
        return [{remedy.name: remedy.value} for remedy in each if remedy.free_bytes is None]

    def search(self, goal: str, record: list[Activity] | None = None) -> tuple[Prediction, Blueprint]:
        """The prediction for the `best` device_memory or the `least` one; for the config's if none fits."""
        chosen = self._best(goal)
        if chosen is None:
            return self.answer(record)
        found, blueprint = self.answer(record, chosen[0])
        return dataclasses.replace(found, chosen={"device_memory": chosen[1]}), blueprint

    def _best(self, goal: str) -> tuple[Settings, int] | None:
        """Settings with the `best` device_memory or the `least` one that fits, and this size; None: none fits."""
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
        return chosen

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
        """The prediction for these settings, by default the config's, and the blueprint of rank 0; see `forecast`."""
        run, node = self._run, self._node
        request = run.request if settings is None else dataclasses.replace(run.request, settings=settings)
        mesh = mesh_of(request.settings, node.ranks_per_node * self._nodes)
        stages, micro_batches = mesh.sizes[Axis.STAGE], request.settings.micro_batches
        samples = self._micro_samples()
        if stages == 1:
            answer, blueprint = self._of_rank(request, samples, record, WHOLE_MODEL)
            return answer.prediction, blueprint
        schedule = request.settings.pipeline_schedule
        rank_of = {mesh.stage(rank): rank for rank in mesh.groups((Axis.STAGE,))[0]}
        chunks = self._chunks(request)
        graphs = most_graphs(schedule, stages, micro_batches, chunks)
        asked = [
            Stage(
                stage,
                rank_of[stage],
                last=stage == stages - 1,
                graphs=graphs[stage],
                micro_batches=micro_batches,
                chunks=chunks,
                fetched_once=schedule == "breadth_first",
            )
            for stage in range(stages)
        ]
        if samples is None:
            samples = min(self._of_rank(request, None, None, stage)[0].prediction.batch_size for stage in asked)
            samples //= micro_batches
        found = [self._of_rank(request, samples, None, stage)[0] for stage in asked[:-1]]
        answer, blueprint = self._of_rank(request, samples, record, asked[-1])
        self._check_stages(blueprint, max(samples, 1))
        made = together(
            [*found, answer], schedule, micro_batches, run.accumulate, chunks, shared_cores=not node.has_own_memory
        )
        if made.pipeline is not None and made.fits:
            blocks = self._faster_blocks(blueprint, samples, stages)
            made = dataclasses.replace(made, pipeline=dataclasses.replace(made.pipeline, faster_blocks=blocks))
        return made, blueprint

    def _chunks(self, request: Request) -> int:
        """Returns the number of runs of blocks of each stage."""
        if request.settings.pipeline_schedule not in SEVERAL_CHUNKS:
            return 1
        machine, world_size = self._node.machine(), self._node.ranks_per_node * self._nodes
        return decide(request, machine, world_size).holders.runs_of_stage

    def _faster_blocks(self, blueprint: Blueprint, samples: int, stages: int) -> tuple[int, ...]:
        """Returns the numbers of blocks of `forecasting.pipeline.faster_blocks`."""
        dtype = _name_of(self._run.request.compute)
        root, *works = self._run.work(blueprint, samples)
        seconds = [self._node.seconds(work, dtype) for work in works]
        if root.end is not None:
            seconds[-1] += self._node.seconds(root.end, dtype)
        runs = [range(run.start - 1, run.stop - 1) for run in blueprint.holders.stage_runs]
        return faster_blocks(seconds, runs, stages)

    def _check_stages(self, blueprint: Blueprint, samples: int) -> None:
        run, runs, stages = self._run, blueprint.holders.stage_runs, blueprint.holders.mesh.sizes[Axis.STAGE]
        batch = resized(run.batch, samples)
        run.check_once(lambda: check_stages(run.model, blueprint.units, runs, stages, batch, run.request.compute))

    def _of_rank(
        self, request: Request, samples: int | None, record: list[Activity] | None, stage: Stage
    ) -> tuple[StageAnswer, Blueprint]:
        """The answer for one rank of a stage, as if it never waited for another stage.

        Args:
            samples: of a micro-batch of the pipeline; None: as many as fit.
        """
        run, node = self._run, self._node
        dtype = _name_of(request.compute)
        node.flops_per_s(dtype)  # raises before the model is laid out
        follows = node.has_own_memory and request.begins_with_least
        world_size = node.ranks_per_node * self._nodes
        blueprint = decide(request, node.machine(), world_size, rank=stage.rank)
        slices = slices_of(blueprint.units, request.settings.slices, blueprint.experts)
        recomputed = recomputed_units(len(blueprint.units), request.settings.recompute_every, slices)
        again = recomputed_around(blueprint.units, recomputed)
        if stage.index not in self._sizes:
            self._sizes[stage.index] = Sizes(run, blueprint, recomputed, stage, slices)
        sizes = self._sizes[stage.index]
        sizes.follow(blueprint)
        made, takes = self._memory(blueprint, again, sizes)
        room = self._rooms[stage.index] = rooms(blueprint, takes, node)
        rates = node.rates(self._nodes, blueprint.holders)
        # All activations are kept if they fit: "auto" batches are the largest of which that is true, if one sample is.
        sizes.choose_with(None)
        if samples is None:
            largest = sizes.largest(room)
        else:
            largest = samples if _fits(sizes.at(max(samples, 1)), room) else 0
        if blueprint.activation_handlings and not largest:
            ram = Tier.HOST if node.has_own_memory else Tier.DEVICE
            room[ram] -= _staging_of_chosen(blueprint, request.settings)
            sizes.choose_with(
                partial(
                    chosen_handlings,
                    blueprint,
                    forward_s=lambda works: [node.seconds(work, dtype) for work in works],
                    rates=rates,
                    room={
                        tier: int((size - (sizes.gradient_bytes if tier.computes else 0)) / (1 + stage.waiting))
                        for tier, size in room.items()
                    },
                    recomputed=recomputed,
                )
            )
            largest = sizes.largest(room) if samples is None else samples
        samples = largest if samples is None else samples
        saved = sizes.at(max(samples, 1))
        works, needed = saved.works, saved.peaks()
        if follows and samples > 0 and needed[Tier.DEVICE] <= room[Tier.DEVICE]:
            beside = with_headroom(needed[Tier.DEVICE], varies=bool(blueprint.by_need))
            below = self._below_peak(blueprint, saved, stage)

            def with_the_rest(beside_bytes: int) -> Blueprint:
                beside_request = dataclasses.replace(request, beside_bytes=beside_bytes)
                return decide(beside_request, node.machine(), world_size, rank=stage.rank)

            for share in SHARES_LEFT:  # as a run does; if none works, the least is all that there is
                with suppress(CapacityError, UsageError):  # UsageError: free pages are scattered
                    share_bytes = int(share * node.device_memory)
                    tried = decided_beside(with_the_rest, beside + share_bytes, below_bytes=below)
                    if tried is None:
                        continue
                    blueprint, _ = tried
                    made, takes = self._memory(blueprint, again, sizes)
                    if below is not None:
                        takes = dataclasses.replace(takes, gradients_beside=gradients_at_peak(blueprint, below))
                    room = rooms(blueprint, takes, node)
                    if sizes.chooses:
                        room[Tier.HOST] -= _staging_of_chosen(blueprint, request.settings)
                    break
        short = next((tier for tier, size in needed.items() if size > room[tier]), None)
        fits = samples > 0 and short is None
        short = short or Tier.DEVICE
        halves, other_s = Halves.NONE, None
        step = StepTime(None, None, f"memory for activations on the {short.name.lower()} tier")
        launch_s, seconds = 0.0, None
        micro_batches = stage.micro_batches * run.accumulate
        passes = run.accumulate if stage.fetched_once else micro_batches
        if fits:

            def calls_of(unit: int, halves: Halves) -> int:
                return min(slices.get(unit, halves.calls), max(samples, halves.calls))

            def timed_step(halves: Halves, record: list[Activity] | None) -> tuple[StepTime, Trace]:
                forward_s = [node.seconds(work, dtype, calls_of(unit, halves)) for unit, work in enumerate(works)]
                unit_s = halves.calls * (node.unit_s or 0.0)
                trace = timed(blueprint.trace, forward_s, saved.recomputed | again.keys(), unit_s)
                sent = exchanges(blueprint, works, trace, again, halves)
                copies = ActivationCopies(waits_s(blueprint, saved.handlings, works, forward_s, rates), saved.offloaded)
                if stage.fetched_once:  # as in one pass that takes as long as those of all micro-batches
                    trace, sent = repeated(trace, sent, stage.micro_batches)
                    copies = copies.repeated(stage.micro_batches)
                return step_time(blueprint, takes.plan, trace, node, rates, passes, copies, sent, record), trace

            halves, other = self._halves(request.settings, samples)
            step, trace = timed_step(halves, record)
            other_s = None if other is None else timed_step(other, None)[0].seconds
            slow = [node.launches_slowly(work, dtype, calls_of(unit, halves)) for unit, work in enumerate(works)]
            launch_s = passes * sum(tick.seconds for tick in trace.ticks if slow[tick.unit])
            if step.timing is not None and launch_s > step.timing.compute_s / 2:
                step = dataclasses.replace(step, binds=step.binds.replace("compute", "launches of kernels"))
        hidden_bytes = 0 if stage.micro_batches == 1 else sizes.hidden_bytes(max(samples, 1))
        if step.timing is not None and step.seconds is not None:
            in_forwards_s = sum(tick.seconds for tick in trace.ticks if tick.phase is Phase.FORWARD)
            seconds = stage_seconds(
                dataclasses.replace(step.timing, seconds=step.seconds),
                in_forwards_s / sum(tick.seconds for tick in trace.ticks),
                micro_batches,
                node.stage_send_s(self._nodes, blueprint.holders.mesh, hidden_bytes) if hidden_bytes else 0.0,
            )
        written = _written_in_step(takes, micro_batches, request.settings, saved.offloaded.get(Tier.DISK, 0))
        lacking = needed[short], room[short]
        reason = "" if fits else shortage(short, max(samples, 1), *lacking, node, unified=blueprint.unified)
        prediction = Prediction(
            **self._facts(),
            numel=blueprint.layout.whole_numel,
            fits=fits,
            reason=reason,
            homes=_homes_of(blueprint),
            tiers=_tiers_of(blueprint, takes, node, needed),
            pages=_pages_by_use(blueprint),
            optimizers=optimizers_in_pages(blueprint),
            batch_size=samples * stage.micro_batches,
            tokens=token_count(resized(run.batch, max(samples, 1) * stage.micro_batches)),
            flops=3
            * sum(work.flops for work in sizes.whole_model(max(samples, 1)))
            * micro_batches
            // blueprint.holders.mesh.sizes[Axis.STAGE],
            timing=step.timing,
            seconds=step.seconds,
            in_halves=halves is not Halves.NONE,
            other_overlap_s=other_s,
            lock_free_s=step.lock_free_s,
            copies_s=step.copies_s,
            launch_s=launch_s,
            binds=step.binds,
            steps_per_pass=None if blueprint.lock_free is None else max(1, blueprint.lock_free.max_staleness),
            chosen={},
            plan=made,
            page_ticks=takes.device_per_tick,
            activation_ticks=saved.ticks,
            disk_written_bytes=written,
            disk_life=self._disk_life(written, request.settings),
            offloaded_bytes=sum(saved.offloaded.values()),
            offloaded_to=" and ".join(tier.place for tier, size in saved.offloaded.items() if size),
            handlings=_handlings_of(blueprint, saved) if sizes.chooses else {},
            may_choose=bool(blueprint.activation_handlings),
            deepens=run.deepens,
            matrix_flops_per_s=node.compute_flops_per_s[dtype],
        )
        blocks = tuple(blueprint.units[unit].name for unit in sizes.own_units)
        return StageAnswer(prediction, blocks, stage.graphs, seconds, hidden_bytes), blueprint

    def _below_peak(
        self, blueprint: Blueprint, saved: Activations, stage: Stage
    ) -> Mapping[frozenset[int], int] | None:
        """Returns, by the units whose gradients may wait in `.grad` meanwhile, by how much less than at its peak a step
        takes; None: a step may begin with gradients of others. As a run has it from the traced step."""
        placement, micro_batches = blueprint.placement, stage.micro_batches
        if not self._run.steps_after_each_pass or micro_batches > 1 or placement.sums_gradients or blueprint.lock_free:
            return None
        trained = list(blueprint.trained_flats())
        outliving = {flat.unit for flat in trained if blueprint.route(flat).outlives_step}
        return planned_below_peak(blueprint.trace, saved.ticks, {flat.unit for flat in trained}, outliving)

    def _halves(self, settings: Settings, samples: int) -> tuple[Halves, Halves | None]:
        """Whether a step computes halves of its batch, and the same with the other value of `TensorParallel.overlap`, where
        that is possible."""
        at_once = not self._node.has_own_memory and self._nodes == 1
        halves = Halves.AT_ONCE if at_once else Halves.HIDING
        if settings.tensor_parallel.in_halves:
            return halves, Halves.NONE
        sizes = settings.context_parallel_size, settings.expert_parallel_size, settings.pipeline_parallel_size
        refused = settings.tensor_parallel_size == 1 or settings.tensor_parallel.sequence_parallel or max(sizes) > 1
        return Halves.NONE, None if refused or samples < 2 else halves

    def _memory(self, blueprint: Blueprint, again: Mapping[int, int], sizes: Sizes) -> tuple[Plan, PredictedMemory]:
        """Returns the plan of a blueprint, and the memory of a run by it."""
        made = make_plan(blueprint, Mode.TRAIN, blueprint.planned(blueprint.trace))
        ends, folders = sizes.ends_with(self._micro_samples()), max(1, len(self._run.request.settings.disk_paths))
        takes = predicted_memory(blueprint, made, blueprint.trace, again, ends, folders)
        collect_after_virtual_run(len(blueprint.units))
        return made, takes

    def _disk_life(self, written: Sequence[int], settings: Settings) -> DiskLife | None:
        """The life of a machine's disks, one for each folder, if each rank writes so many bytes to each in a step."""
        if not written:
            return None
        given = settings.rated_disk_bytes
        rated = rated_bytes(given, self._disk_bytes or self._node.disk_memory // len(written))
        return DiskLife(max(written) * self._node.ranks_per_node, rated, given is not None)

    def _parts(self) -> list[tuple[Settings, int]]:
        """Settings with each device_memory to search, smallest first."""
        sizes = [self._node.device_memory * part // _DEVICE_SHARES for part in range(1, _DEVICE_SHARES)]
        settings = self._run.request.settings
        return [(dataclasses.replace(settings, device_memory=size), size) for size in sizes]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _homes_of(blueprint: Blueprint) -> dict[str, dict[str, int]]:
    """Returns `Prediction.homes` of a blueprint."""
    kinds = (Kind.PARAMETER, Kind.GRADIENT, Kind.MASTER)
    found = {kind.value: {tier.name.lower(): 0 for tier in blueprint.budget} for kind in kinds}
    for flat in blueprint.layout.flats:
        homes = blueprint.placement.homes[flat.unit]
        found["parameter"][homes.parameter.name.lower()] += flat.shard_bytes
        if flat.trainable:
            gradient = blueprint.placement.homes[flat.unit].gradient
            passes = blueprint.placement.passing_bytes and not blueprint.placement.keeps_gradients
            if blueprint.placement.keeps_gradients or not (gradient.computes or passes):
                found["gradient"][gradient.name.lower()] += flat.gradient_bytes
            found["master"][homes.master.name.lower()] += blueprint.placement.master_bytes(flat)
    found["gradient"][blueprint.ram.name.lower()] += blueprint.placement.passing_bytes
    return found


def _written_in_step(
    takes: PredictedMemory, micro_batches: int, settings: Settings, activation_bytes: int
) -> tuple[int, ...]:
    """Returns `Prediction.disk_written_bytes`: writes of updates and gradients, and those of activations, evenly striped."""
    folders = len(settings.disk_paths)
    written = takes.disk_writes.of_step(micro_batches) or (0,) * folders
    written = tuple(size + activation_bytes * micro_batches // folders for size in written)
    return written if any(written) else ()


def _fits(saved: Activations, room: Mapping[Tier, int]) -> bool:
    return all(size <= room[tier] for tier, size in saved.peaks().items())


def _staging_of_chosen(blueprint: Blueprint, settings: Settings) -> int:
    """Returns the bytes of RAM of the buffers between device and disk where the run may choose the disk for activations."""
    on_disk = any(handling.tier is Tier.DISK for handling in blueprint.activation_handlings)
    return staging_bytes(len(settings.disk_paths)) if on_disk else 0


def _handlings_of(blueprint: Blueprint, saved: Activations) -> dict[str, str]:
    """Returns `Prediction.handlings`."""
    return {unit.name: handling.value for unit, handling in zip(blueprint.units[1:], saved.handlings[1:], strict=True)}


def _pages_by_use(blueprint: Blueprint) -> dict[str, dict[str, int]]:
    """Returns `Prediction.pages` of a blueprint."""
    return {
        tier.name.lower(): {what.value: size for what, size in blueprint.inventory.by_what(tier).items()}
        for tier in blueprint.budget
    }


def _tiers_of(
    blueprint: Blueprint, takes: PredictedMemory, node: Node, activations: Mapping[Tier, int]
) -> dict[str, TierPlan]:
    """Returns `Prediction.tiers` of a blueprint.

    Args:
        takes: the predicted memory of the run.
        activations: by tier, bytes of activations.
    """
    ranks = node.ranks_per_node
    gradients = takes.gradients_beside
    host = node.host_memory // ranks
    have = {
        **blueprint.budget,
        Tier.DEVICE: node.device_memory if node.has_own_memory else host,
        Tier.HOST: 0 if blueprint.unified else host,
    }
    return {
        tier.name.lower(): TierPlan(
            page_bytes=takes.peak(tier),
            reserved_bytes=blueprint.pool_bytes[tier],
            gradient_bytes=gradients if tier.computes else 0,
            activation_bytes=activations.get(tier, 0),
            have_bytes=have[tier],
            taken_bytes=(blueprint.pool_bytes[tier] + (gradients if tier.computes else 0) + activations.get(tier, 0)),
        )
        for tier in blueprint.budget
    }
