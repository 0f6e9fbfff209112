"""Sources of a flat's gradient (pages or `.grad` tensors), and the unscaling and clipping before the optimizer reads it.

Owns no pages. Reads stretches of a shard's gradient into scratch, so that a full-size copy is never made.
I1: a reader returns the same elements by `view` and by `read_into`, in shard order, in the gradient's own dtype or cast.
I2: Transform does to each element what torch.amp.GradScaler.unscale_, clip_grad_norm_ and clip_grad_value_ do, in that
    order, each rounded separately, so that the result is bitwise that of a plain training loop.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.memory.backend import in_ram
from lightning_ptm.torch_internals import version_of
from lightning_ptm.update.flat_states import Segment, StateRun

if TYPE_CHECKING:
    from lightning_ptm.memory.backend import Backend
    from lightning_ptm.memory.paged_tensor import PagedTensor
    from lightning_ptm.planning.layout import FlatLayout


@dataclasses.dataclass(frozen=True, slots=True)
class Transform:
    """Unscaling and clipping of a gradient before the optimizer reads it.

    Attributes:
        unscale: 0-dim tensor, 1 / loss scale.
        clip: 0-dim tensor, the coefficient of clipping by norm (norms.py: `clip_coefficient`).
        clamp: bound of clipping by value.
        then: further clips, each applied to the result of the one before.
        share: the last factor; not 1 where gradients of several steps were added (lock_free_buffers.py).
    """

    unscale: torch.Tensor | None = None
    clip: torch.Tensor | None = None
    clamp: float | None = None
    then: tuple[Transform, ...] = ()
    share: float = 1.0

    @property
    def is_identity(self) -> bool:
        if self is NO_TRANSFORM:  # asked for every run of elements, mostly of this one
            return True
        for factor in (self.unscale, self.clip):
            if factor is not None and not _is_one(factor):
                return False
        alone = self.clamp is None and self.share == 1.0
        return alone and (not self.then or all(each.is_identity for each in self.then))

    @property
    def factor(self) -> float:
        """Product of all factors. Waits for factors on a device."""
        later = math.prod(each.factor for each in self.then)
        return self.share * _value(self.unscale) * _value(self.clip) * later

    def tensors(self) -> Iterator[torch.Tensor]:
        """The factors that are tensors."""
        for factor in (self.unscale, self.clip):
            if factor is not None:
                yield factor
        for each in self.then:
            yield from each.tensors()

    def apply_(self, gradient: torch.Tensor) -> None:
        """Transforms `gradient` in place."""
        for factor in (self.unscale, self.clip):
            if factor is not None and not _is_one(factor):
                # A number in RAM is copied to the device without stopping the host.
                gradient.mul_(factor.to(gradient.device, non_blocking=in_ram(factor)))
        if self.clamp is not None:
            gradient.clamp_(min=-self.clamp, max=self.clamp)
        for each in self.then:
            each.apply_(gradient)
        if self.share != 1.0:
            gradient.mul_(self.share)


NO_TRANSFORM = Transform()


def _is_one(factor: torch.Tensor) -> bool:
    # Reading a device tensor's value would stop the host: such a factor is multiplied even if it is one.
    return in_ram(factor) and bool(factor == 1)


def _value(factor: torch.Tensor | None) -> float:
    return 1.0 if factor is None else float(factor)


class GradientReader(Protocol):
    """A shard's gradient, readable on the device where the arithmetic runs."""

    def view(self, run: StateRun) -> torch.Tensor | None:
        """The run's elements without a copy, 1-D; None where they are not contiguous."""

    def read_into(self, target: torch.Tensor, run: StateRun) -> None:
        """Copies and casts the run's elements into `target`, shape (run.numel,). Alignment gaps become finite or zero."""


class TensorGradient:
    """Elements [start, start + tensor.numel()) of a shard's gradient in one 1-D tensor."""

    def __init__(self, tensor: torch.Tensor, start: int = 0) -> None:
        self._tensor = tensor
        self._start = start

    def view(self, run: StateRun) -> torch.Tensor | None:
        return self._tensor.narrow(0, run.start - self._start, run.numel)

    def read_into(self, target: torch.Tensor, run: StateRun) -> None:
        target.copy_(self._tensor.narrow(0, run.start - self._start, run.numel))
        _zero_gaps(target, run)


class ShardGradient:
    """Reduced gradients of this rank's shard in pages of any tier, in flat order.

    Args:
        paged: `flat.shard_numel` elements. Must not change until the job's handle is done.
        present: for each parameter of the flat, whether it has a gradient; None: all have.
    """

    def __init__(self, paged: PagedTensor, present: Sequence[bool] | None = None) -> None:
        self.paged = paged
        self._present = present

    def present(self, flat: FlatLayout) -> Sequence[bool]:
        """Returns, for each parameter of the flat, whether it has a gradient."""
        if self.paged.numel != flat.shard_numel:
            raise InternalError(f"{self.paged.name} has {self.paged.numel} elements, its shard {flat.shard_numel}")
        return self._present if self._present is not None else (True,) * len(flat.slots)

    @property
    def which(self) -> tuple[bool, ...] | None:
        """Returns, for each parameter, whether it has a gradient; None: all have."""
        return None if self._present is None or all(self._present) else tuple(self._present)

    def tensors(self) -> list[torch.Tensor]:
        """The shard's elements as one view of the pages, which must be in RAM."""
        return [self.paged.tensor()]


class ParameterGradients:
    """The parameters' own `.grad` tensors, where one rank has the whole flat (world size 1) and no shard is made.

    Args:
        gradients: for each parameter of the flat, in order, its dense `.grad` (any shape, elements in the order of the flat)
            or None. A gradient that is not contiguous is copied here, once.
    """

    def __init__(self, gradients: Iterable[torch.Tensor | None]) -> None:
        self._flat = [None if gradient is None else gradient.detach().reshape(-1) for gradient in gradients]
        self._versions: list[int] | None = None

    def watch(self) -> None:
        """Records the tensors' versions: if the user's code, which has them too, changes one, its use raises a UsageError."""
        self._versions = [0 if gradient is None else version_of(gradient) for gradient in self._flat]

    def watch_on(self) -> None:
        """Records the tensors' versions again, if they are watched: what changed them was the optimizer's own step."""
        if self._versions is not None:
            self.watch()

    def present(self, flat: FlatLayout) -> Sequence[bool]:
        """Returns, for each parameter of the flat, whether it has a gradient.

        Raises:
            UsageError: a gradient has another number of elements than its parameter had when it was laid out.
        """
        if len(flat.slots) != len(self._flat):
            raise InternalError(f"the flat has {len(flat.slots)} parameters, gradients came for {len(self._flat)}")
        for slot, gradient in zip(flat.slots, self._flat, strict=True):
            if gradient is not None and gradient.numel() != slot.numel:
                raise UsageError(
                    f"the gradient of {slot.spec.name} has {gradient.numel()} elements, its pages {slot.numel}; "
                    "parameters must keep their shape during a fit"
                )
        return tuple(gradient is not None for gradient in self._flat)

    @property
    def which(self) -> tuple[bool, ...] | None:
        """Returns, for each parameter, whether it has a gradient; None: all have."""
        here = tuple(gradient is not None for gradient in self._flat)
        return None if all(here) else here

    def tensors(self) -> list[torch.Tensor]:
        """The gradients that are not None, each as a 1-D view."""
        return [gradient for gradient in self._flat if gradient is not None]

    def storages(self) -> frozenset[int]:
        """Addresses of the storages of the gradients."""
        return frozenset([gradient.untyped_storage().data_ptr() for gradient in self.tensors()])

    def view(self, run: StateRun) -> torch.Tensor | None:
        return self.piece(run.segments[0]) if len(run.segments) == 1 else None

    def read_into(self, target: torch.Tensor, run: StateRun) -> None:
        for segment in run.segments:
            target.narrow(0, segment.start - run.start, segment.numel).copy_(self.piece(segment))
        _zero_gaps(target, run)

    def has(self, parameter: int) -> bool:
        """Whether a parameter of the flat has a gradient."""
        return self._flat[parameter] is not None

    def forget(self, backend: Backend) -> None:
        """Drops the gradients after the job has used them, or has queued their use on the current stream."""
        for gradient in self._flat:
            if gradient is not None:
                backend.record_use(gradient)  # made by another stream
        self._flat.clear()

    def piece(self, segment: Segment) -> torch.Tensor:
        """The gradient of a stretch of one parameter, (segment.numel,)."""
        gradient = self._flat[segment.parameter]
        if gradient is None:
            raise InternalError(f"parameter {segment.parameter} of the flat has no gradient")
        if self._versions is not None and version_of(gradient) != self._versions[segment.parameter]:
            raise UsageError(
                f"a gradient (of parameter number {segment.parameter} of its unit) was changed in place after the "
                f"optimizer's step, before the update had read it; change it before the step, or set it to None; "
                f"between steps of two optimizers that share it, clip with self.clip_gradients, which waits for the "
                f"update"
            )
        return gradient.narrow(0, segment.parameter_start, segment.numel)


GradientSource = ShardGradient | ParameterGradients


def add_(ours: GradientSource, our: Transform, theirs: GradientSource, their: Transform) -> Transform:
    """Adds another step's gradients of the same parameters, each first transformed by its own step's transform.

    The sum is rounded to the gradients' dtype. float16 lacks the range for gradients without their loss scale and for sums
    of scaled ones, which come near its largest number. For float16, `ours` becomes the mean of both, weighted by their
    factors: it is no larger than the larger of both, and small elements lose no more precision than in the cast to float16.

    Args:
        ours: gets the sum. In RAM, as is `theirs`, which is changed, too.

    Returns:
        The transform that is still to be applied to `ours`.
    """
    pairs = list(zip(ours.tensors(), theirs.tensors(), strict=True))
    if any(mine.dtype is torch.float16 for mine, _ in pairs):
        factors = our.factor, their.factor
        whole = sum(factors)
        for mine, other in pairs:
            _clamp_scaled_(mine, our)
            _clamp_scaled_(other, their)
            mine.lerp_(other, factors[1] / whole if whole else 0.5)
        return Transform(unscale=torch.tensor(whole, dtype=torch.float32))
    for mine, other in pairs:
        our.apply_(mine)
        their.apply_(other)
        mine.add_(other)
    return NO_TRANSFORM


def _clamp_scaled_(gradient: torch.Tensor, how: Transform) -> None:
    """Clamps a gradient that is not yet multiplied by its factors, as if clamped afterwards."""
    factor = 1.0
    for each in (dataclasses.replace(how, then=()), *how.then):
        factor *= each.factor
        if each.clamp is not None and each.clamp < factor * torch.finfo(gradient.dtype).max:
            gradient.clamp_(min=-each.clamp / factor, max=each.clamp / factor)


def _zero_gaps(target: torch.Tensor, run: StateRun) -> None:
    for before, after in zip(run.segments, run.segments[1:], strict=False):
        if after.start > before.stop:
            target.narrow(0, before.stop - run.start, after.start - before.stop).zero_()
