"""Arithmetic of one chunk's update: gradient into scratch, optimizer step, compute copy, while the bytes are in the cache.

Owns the scratch tensors. Knows tensor views, never transfers.
I1: a chunk reads and writes only the windows that it is given.
I2: the compute copy of an element is its master value after the step, rounded. It is written for updated elements, and for
    the whole chunk where the compute pages are staged (unchanged elements then get the same bytes again). A job with a
    weight prediction writes instead what momentum alone would make of the master values next.
I3: where a chunk is cut into optimizer calls depends on the flat and on the kind of device that computes, never on the
    tiers, so the tiers cannot change bits. A parameter that is updated whole is a call of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from lightning_ptm.memory.backend import in_ram
from lightning_ptm.update.flat_states import Segment, StateRun
from lightning_ptm.update.gradient_source import GradientReader, ParameterGradients, ShardGradient, TensorGradient
from lightning_ptm.update.merged_steps import FIRST_MOMENT, MergedSteps
from lightning_ptm.update.shadow import GroupValues, RunViews, frozen_scalars
from lightning_ptm.update.update_job import GRADIENT, PARAMETER, SCRATCH, TARGET, JobUnderWay, UpdateJob


@dataclasses.dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk's windows and the optimizer step to take. The tensors are 1-D, elements of the shard from `start` on."""

    progress: JobUnderWay
    hyper: GroupValues
    start: int
    parameter: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    target: torch.Tensor | None
    reader: GradientReader
    merged: Mapping[int, MergedSteps] = dataclasses.field(default_factory=dict)


class Arithmetic:
    """Runs the optimizer on chunks. Used by one thread at a time, under the caller's no_grad.

    Args:
        block_numel: most elements per optimizer call, a multiple of ALIGN_NUMEL; the bytes that a call touches should fit
            the cache.
        device_block_numel: the same on a device that is not the CPU, where a call costs the host more than the device.
    """

    def __init__(self, block_numel: int, device_block_numel: int) -> None:
        self._block_numel, self._device_block_numel = block_numel, device_block_numel

        self._scratch: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        self._before: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def update(
        self, progress: JobUnderWay, start: int, numel: int, windows: Mapping[str, torch.Tensor], *, whole_target: bool
    ) -> None:
        """Runs a job's optimizer steps over elements [start, start + numel) of its shard.

        Args:
            progress: the job.
            start: first element in the shard.
            numel: elements.
            windows: for each column role a 1-D tensor of exactly these elements.
            whole_target: rewrite the compute copy of elements without a gradient, too.
        """
        job, states = progress.job, progress.job.states
        parameter = windows[PARAMETER]
        if states.traits.whole:
            self._update_whole(progress, start, numel, windows, whole_target=whole_target)
            return
        slots = {name: windows[name] for name in states.slots if name in windows}
        reader = _reader(progress, start, windows)
        target = None if whole_target else windows.get(TARGET)
        before: torch.Tensor | None = None
        runs = states.runs(start, numel, progress.present)
        if progress.merged:
            chunk = _Chunk(
                progress, self._merged_hyper(progress), start, parameter, slots, target, reader, progress.merged
            )
            self._step(chunk, [self._counted(run, progress.merged[run.group]) for run in runs])
            _end(progress, start, runs, None, windows, whole_target=whole_target)
            return
        for count, hyper in enumerate(job.steps):
            if count:
                known = progress.scalars_after(parameter)[count - 1]
                runs_now = [dataclasses.replace(run, scalars=known[run.group, id(run.scalars)]) for run in runs]
            else:
                runs_now = runs
            if job.prediction is not None and hyper is job.hyper:
                before = self._copy_of(parameter)
            self._step(_Chunk(progress, hyper, start, parameter, slots, target, reader), runs_now)
        _end(progress, start, runs_now, before, windows, whole_target=whole_target)

    @staticmethod
    def _update_whole(
        progress: JobUnderWay, start: int, numel: int, windows: Mapping[str, torch.Tensor], *, whole_target: bool
    ) -> None:
        """`update` for parameters that are updated whole: each in turn goes through all steps of the job."""
        job, states = progress.job, progress.job.states
        reader = _reader(progress, start, windows)
        firsts = {name: states.layouts[name].stretch(start, numel)[0] for name in states.slots if name in windows}
        for index, slot in states.whole.items():
            group = states.groups[index]
            if not start <= slot.start < start + numel or group is None or not progress.present[index]:
                continue
            shape, scalars = slot.spec.shape, states.scalars(index)
            value = windows[PARAMETER].narrow(0, slot.start - start, slot.numel)
            slots = {
                name: states.own_state(name, index, windows[name], firsts[name]) for name in states.state_names(index)
            }
            segment = Segment(index, slot.start, 0, slot.numel, ragged=False)
            run = StateRun(group, scalars, slot.start, slot.numel, (segment,))
            given = reader.view(run)
            direct = given is not None and _is_direct(job, value, given)
            for hyper in job.steps:
                gradient = given if direct else windows[SCRATCH].narrow(0, 0, slot.numel)
                assert gradient is not None
                if not direct:
                    reader.read_into(gradient, run)
                    job.transform.apply_(gradient)
                views = RunViews(group, value.view(shape), gradient.view(shape), slots, scalars)
                scalars = progress.whole_scalars[index] = job.shadow.step_whole(hyper, views)
            if states.traits.writes_gradient and isinstance(job.gradient, ParameterGradients):
                job.gradient.watch_on()
            if TARGET in windows and not whole_target:
                windows[TARGET].narrow(0, slot.start - start, slot.numel).copy_(value)
        if whole_target:
            windows[TARGET].copy_(windows[PARAMETER])

    @staticmethod
    def _merged_hyper(progress: JobUnderWay) -> GroupValues:
        groups = enumerate(progress.job.hyper.groups)
        merged = progress.merged
        known = tuple(merged[i].group if i in merged else group for i, group in groups)
        return GroupValues(known, progress.job.hyper.number)

    @staticmethod
    def _counted(run: StateRun, merged: MergedSteps) -> StateRun:
        assert run.scalars is not None
        step = run.scalars.values["step"]
        counted = torch.full_like(step, merged.step) if isinstance(step, torch.Tensor) else merged.step
        return dataclasses.replace(run, scalars=frozen_scalars({**run.scalars.values, "step": counted}))

    def _step(self, chunk: _Chunk, runs: Sequence[StateRun]) -> None:
        """Runs one optimizer step over the chunk."""
        small: list[StateRun] = []
        small_numel, block = 0, self._block(chunk.parameter)
        for run in runs:
            if run.numel > block:
                self._update_large(chunk, run)
                continue
            if small_numel + run.numel > block:
                self._update_small(chunk, small)
                small, small_numel = [], 0
            small.append(run)
            small_numel += run.numel
        if small:
            self._update_small(chunk, small)

    def _update_small(self, chunk: _Chunk, runs: list[StateRun]) -> None:
        """Updates several runs in one optimizer call."""
        views: list[RunViews] = []
        offset, numel = 0, sum(run.numel for run in runs)
        for run in runs:
            start = run.start - chunk.start
            parameter = chunk.parameter.narrow(0, start, run.numel)
            gradient = self._direct(chunk, chunk.reader.view(run))
            if gradient is None:
                gradient = self._scratch_like(parameter, numel).narrow(0, offset, run.numel)
                chunk.reader.read_into(gradient, run)
                chunk.progress.job.transform.apply_(gradient)
            offset += run.numel
            slots = {name: chunk.slots[name].narrow(0, start, run.numel) for name in self._slot_names(chunk, run)}
            views.append(RunViews(run.group, parameter, gradient, slots, run.scalars))
        self._optimize(chunk, views)
        if chunk.target is not None:
            for run, view in zip(runs, views, strict=True):
                chunk.target.narrow(0, run.start - chunk.start, run.numel).copy_(view.parameter)

    def _update_large(self, chunk: _Chunk, run: StateRun) -> None:
        """Updates one run in several optimizer calls."""
        whole = chunk.reader.view(run)
        if whole is None:
            for part in self._cut(run, self._block(chunk.parameter)):
                self._update_small(chunk, [part])
            return
        # `split` makes all views at once: as many `narrow` calls would cost more than the optimizer's own dispatch.
        start, block = run.start - chunk.start, self._block(chunk.parameter)
        job = chunk.progress.job
        names = self._slot_names(chunk, run)
        slots = zip(*(chunk.slots[name].narrow(0, start, run.numel).split(block) for name in names), strict=True)
        parameters = chunk.parameter.narrow(0, start, run.numel).split(block)
        targets = chunk.target.narrow(0, start, run.numel).split(block) if chunk.target is not None else None
        direct = self._direct(chunk, whole)
        scratch = chunk.parameter if direct is not None else self._scratch_like(chunk.parameter, block)
        for index, (parameter, given) in enumerate(zip(parameters, whole.split(block), strict=True)):
            gradient = given
            if direct is None:
                gradient = scratch if parameter.numel() == block else scratch.narrow(0, 0, parameter.numel())
                gradient.copy_(given)
                job.transform.apply_(gradient)
            state = dict(zip(names, next(slots), strict=True)) if names else {}
            views = [RunViews(run.group, parameter, gradient, state, run.scalars)]
            self._optimize(chunk, views)
            if targets is not None:
                targets[index].copy_(parameter)

    @staticmethod
    def _optimize(chunk: _Chunk, views: Sequence[RunViews]) -> None:
        """Calls the optimizer once."""
        job = chunk.progress.job
        job.shadow.step(chunk.hyper, views)
        if job.states.traits.writes_gradient and isinstance(job.gradient, ParameterGradients):
            job.gradient.watch_on()
        for view in views if chunk.merged else ():
            view.slots[FIRST_MOMENT].lerp_(view.gradient, chunk.merged[view.group].correction)

    @staticmethod
    def _cut(run: StateRun, block: int) -> Iterator[StateRun]:
        for start in range(run.start, run.stop, block):
            stop = min(start + block, run.stop)
            segments = tuple(
                segment.cut(start, stop) for segment in run.segments if segment.start < stop and segment.stop > start
            )
            if segments:
                yield StateRun(run.group, run.scalars, start, stop - start, segments)

    @staticmethod
    def _slot_names(chunk: _Chunk, run: StateRun) -> tuple[str, ...]:
        return chunk.progress.job.states.slot_names[run.group]

    @staticmethod
    def _direct(chunk: _Chunk, view: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient itself where the optimizer can read it without a copy, else None."""
        return view if view is not None and _is_direct(chunk.progress.job, chunk.parameter, view) else None

    def _copy_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """A copy of `parameter`, valid until the next chunk."""
        key = (parameter.device, parameter.dtype)
        known = self._before.get(key)
        if known is None or known.numel() < parameter.numel():
            known = self._before[key] = torch.empty_like(parameter)
        return known.narrow(0, 0, parameter.numel()).copy_(parameter)

    def _block(self, parameter: torch.Tensor) -> int:
        return self._block_numel if in_ram(parameter) else self._device_block_numel

    def _scratch_like(self, parameter: torch.Tensor, numel: int) -> torch.Tensor:
        """At least `numel` elements; on a device as few as were asked for at most."""
        key = (parameter.device, parameter.dtype)
        known = self._scratch.get(key)
        if known is None or known.numel() < numel:
            size = self._block_numel if in_ram(parameter) else numel
            del known
            self._scratch.pop(key, None)  # before the larger one is made: the device has room for one
            known = self._scratch[key] = torch.empty(size, dtype=parameter.dtype, device=parameter.device)
        return known


def _end(
    progress: JobUnderWay,
    start: int,
    runs: Sequence[StateRun],
    before: torch.Tensor | None,
    windows: Mapping[str, torch.Tensor],
    *,
    whole_target: bool,
) -> None:
    """Ends a chunk's update: the weight prediction learns from it, and the compute copy is written.

    Args:
        runs: the runs, with their scalars before the last step.
        before: the parameters before that step, which a weight prediction needs; None without one.
    """
    job, parameter = progress.job, windows[PARAMETER]
    if job.prediction is not None and before is not None:
        for run in runs:
            place = (run.start - start, run.numel)
            slots = {name: windows[name].narrow(0, *place) for name in job.states.slot_names[run.group]}
            job.prediction.learn(run, before.narrow(0, *place), parameter.narrow(0, *place), slots)
        windows[TARGET].copy_(before)
    elif whole_target:
        windows[TARGET].copy_(parameter)


def _is_direct(job: UpdateJob, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether the optimizer can read a gradient as it is, without a cast, a factor or a copy."""
    return (
        gradient.dtype == parameter.dtype
        and gradient.device == parameter.device
        and job.transform.is_identity
        and not (job.earlier and job.states.traits.writes_gradient)
    )


def _reader(progress: JobUnderWay, start: int, windows: Mapping[str, torch.Tensor]) -> GradientReader:
    gradient = progress.job.gradient
    return TensorGradient(windows[GRADIENT], start) if isinstance(gradient, ShardGradient) else gradient
