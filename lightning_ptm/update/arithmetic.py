"""One chunk's arithmetic: gradient into scratch, optimizer, compute copy, all while the bytes are hot in the cache.

Owns the scratch. Knows views, never transfers.
I1: what a chunk reads and writes lies in the windows that it is given; nothing else is touched.
I2: the compute copy of an element is the rounding of its master after the step, for updated elements, and for the
    whole chunk where the compute pages are staged (unchanged elements then get the same bytes again).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_ptm.update.gradient import GradientReader, TensorGradient
from lightning_ptm.update.job import GRADIENT, PARAMETER, TARGET, Progress
from lightning_ptm.update.shadow import RunViews
from lightning_ptm.update.states import Run


class Arithmetic:
    """Updates chunks. One thread at a time.

    Args:
        block_numel: elements per optimizer call, a multiple of ALIGN_NUMEL; what a call touches should fit the cache.
    """

    def __init__(self, block_numel: int) -> None:
        self._block_numel = block_numel

        self._scratch: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    @torch.no_grad()
    def update(
        self, progress: Progress, start: int, numel: int, windows: Mapping[str, torch.Tensor], *, whole_target: bool
    ) -> None:
        """Run one optimizer step over elements [start, start + numel) of a job's shard.

        Args:
            progress: the job.
            start: first element in the shard.
            numel: elements.
            windows: for each column role a 1-D tensor of exactly these elements.
            whole_target: rewrite the compute copy of elements without a gradient too.
        """
        reader: GradientReader
        if GRADIENT in windows:
            reader = TensorGradient(windows[GRADIENT], start)
        else:
            assert not hasattr(progress.job.gradient, "paged")
            reader = progress.job.gradient  # type: ignore[assignment]
        for begin in range(start, start + numel, self._block_numel):
            count = min(self._block_numel, start + numel - begin)
            self._update_block(progress, begin, count, start, windows, reader, whole_target)

    def _update_block(
        self,
        progress: Progress,
        begin: int,
        count: int,
        origin: int,
        windows: Mapping[str, torch.Tensor],
        reader: GradientReader,
        whole_target: bool,
    ) -> None:
        job = progress.job
        runs = job.states.runs(begin, count, progress.present)
        parameter = windows[PARAMETER]
        slots = {name: windows[name] for name in job.states.slots}
        used = {index: self._slot_names(progress, index) for index in {run.group for run in runs}}
        views = [
            RunViews(
                run.group,
                parameter.narrow(0, run.start - origin, run.numel),
                self._gradient(progress, reader, run, begin, parameter),
                {name: slots[name].narrow(0, run.start - origin, run.numel) for name in used[run.group]},
                run.scalars,
            )
            for run in runs
        ]
        if views:
            job.shadow.step(job.hyper, views)
        target = windows.get(TARGET)
        if target is None:
            return
        if whole_target:
            target.narrow(0, begin - origin, count).copy_(parameter.narrow(0, begin - origin, count))
        else:
            for run, view in zip(runs, views, strict=True):
                target.narrow(0, run.start - origin, run.numel).copy_(view.parameter)

    @staticmethod
    def _slot_names(progress: Progress, group: int) -> tuple[str, ...]:
        return tuple(slot.name for slot in progress.job.states.traits.groups[group].slots)

    def _gradient(
        self, progress: Progress, reader: GradientReader, run: Run, begin: int, parameter: torch.Tensor
    ) -> torch.Tensor:
        transform = progress.job.transform
        view = reader.view(run)
        if (
            view is not None
            and view.dtype == parameter.dtype
            and view.device == parameter.device
            and transform.is_identity
        ):
            return view
        scratch = self._scratch_like(parameter).narrow(0, run.start - begin, run.numel)
        reader.read_into(scratch, run)
        transform.apply_(scratch)
        return scratch

    def _scratch_like(self, parameter: torch.Tensor) -> torch.Tensor:
        key = (parameter.device, parameter.dtype)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(self._block_numel, dtype=parameter.dtype, device=parameter.device)
        return self._scratch[key]
