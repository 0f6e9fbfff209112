"""Gradient norms, clipping and loss scaling over gradients in pages, before the update.

Owns, per optimizer, the transform that the next step applies (clips in their order, loss scale). The gradients
themselves stay unchanged: the update applies the transform to its copy of each page (with the values of torch's clip
functions, bit for bit on one rank). Gradients that stay after the step, or that the update reads from `.grad`, are
clipped in place, as torch does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ptm.comm import Communicator
from lightning_ptm.runtime.updates.optimizer_groups import FlatUpdate
from lightning_ptm.runtime.updates.updates import UpdateScheduler
from lightning_ptm.update.gradient_source import (
    NO_TRANSFORM,
    GradientReader,
    ParameterGradients,
    TensorGradient,
    Transform,
)
from lightning_ptm.update.loss_scale import LossScale
from lightning_ptm.update.norms import (
    clip_coefficient,
    greatest,
    norm_of_power,
    parameter_norms,
    shard_power,
    total_norm,
)


class Clipping:
    """Norms and transforms of one engine."""

    def __init__(
        self,
        communicator: Communicator,
        updates: UpdateScheduler,
        optimizers: Sequence[Optimizer],
    ) -> None:
        self._communicator = communicator
        self._updates = updates
        self._optimizers = optimizers
        self._clips: dict[int, Transform] = {}
        """By optimizer, the clips still to be applied by the update; stale if no flat of the optimizer is marked
        `clipped_later`."""
        self._unscale: dict[int, Tensor | None] = {}
        self.waiting = False
        """Whether some optimizer's next step may clip or unscale."""

    def by_norm(self, optimizer: int, max_norm: float, scale: LossScale | None) -> None:
        """Clips at the next step by the global norm. Collective."""
        coefficient = clip_coefficient(self.norm(optimizer, 2.0, scale), max_norm)
        self._clip(optimizer, Transform(clip=coefficient), scale)

    def by_value(self, optimizer: int, clip_value: float, scale: LossScale | None) -> None:
        """Clamps at the next step."""
        self._clip(optimizer, Transform(clamp=clip_value), scale)

    def _clip(self, optimizer: int, how: Transform, scale: LossScale | None) -> None:
        before = self._pending(optimizer)
        flats = [flat for _, flat in self._updates.groups.flats_of(optimizer) if flat.gradient.any]
        for flat in flats:
            if flat.gradient.route.clips_in_place and scale is None:
                flat.gradient.transform_(how)
            else:
                flat.gradient.view.clip_later()
        if any(flat.gradient.view.clipped_later for flat in flats):
            self._clips[optimizer] = dataclasses.replace(before, then=(*before.then, how))
            self.waiting = True

    def _pending(self, optimizer: int) -> Transform:
        """The clips that an optimizer's gradients still need."""
        clips = self._clips.get(optimizer)
        if clips is None or not any(
            flat.gradient.view.clipped_later for _, flat in self._updates.groups.flats_of(optimizer)
        ):
            return NO_TRANSFORM
        return clips

    def unscale(self, optimizer: int, scale: LossScale) -> None:
        """Removes the loss scale at the next step."""
        self._unscale[optimizer] = _unscale(scale)
        self.waiting = True

    def unscales(self, optimizer: int) -> bool:
        """Whether the next step removes a loss scale."""
        return self._unscale.get(optimizer) is not None

    def take(self, optimizer: int) -> Transform:
        """Returns the transform of the step that starts now, and forgets it."""
        transform = dataclasses.replace(self._pending(optimizer), unscale=self._unscale.pop(optimizer, None))
        self._clips.pop(optimizer, None)
        self.waiting = bool(self._clips or self._unscale)
        return transform

    def norm(self, optimizer: int, norm_type: float, scale: LossScale | None) -> Tensor:
        """Global norm of the optimizer's gradients as the update would get them now. Collective."""
        unscale, clips = _unscale(scale), self._pending(optimizer)
        self._updates.groups.follow(optimizer, self._updates.finish_all)
        flats = [flat for _, flat in reversed(self._updates.groups.flats_of(optimizer))]
        if self._communicator.alone:
            groups = self._optimizers[optimizer].param_groups
            order = {id(parameter): place for place, parameter in enumerate(p for g in groups for p in g["params"])}
            norms: list[tuple[int, Tensor]] = []
            for flat in flats:
                if flat.gradient.any:
                    norms.extend(self._of_parameters(flat, norm_type, unscale, clips, order))
            norms.sort(key=lambda pair: pair[0])
            return total_norm([norm for _, norm in norms], norm_type)
        power = torch.zeros((), dtype=torch.float64)
        infinite = norm_type == float("inf")
        widest: torch.dtype | None = None
        for flat in flats:
            if flat.gradient.any:
                dtype = _dtype(flat)
                widest = dtype if widest is None else torch.promote_types(widest, dtype)
                part = shard_power(
                    flat.states,
                    _reader(flat),
                    flat.gradient.view.present(),
                    norm_type=norm_type,
                    dtype=dtype,
                    transform=_so_far(flat, unscale, clips),
                ).cpu()
                _done_reading(flat)
                power = torch.maximum(power, part) if infinite else power + part
        return norm_of_power(self._communicator.all_reduce(power, maximum=infinite), norm_type, widest or torch.float32)

    def all_finite(self, optimizer: int) -> bool:
        """Whether no gradient of the optimizer, on any rank, is inf or NaN. Collective."""
        found: list[Tensor] = []
        for _, flat in self._updates.groups.flats_of(optimizer):
            if not flat.gradient.any:
                continue
            if flat.gradient.in_place:
                gradients = flat.store.binding.arrangement.in_orders(flat.gradient.view.gradients())
                found.append(greatest([each for each in gradients if each is not None]))
            else:
                found.append(greatest([flat.gradient.shard.on_device()]))
                flat.gradient.shard.settle()
        finite = math.isfinite(greatest(found).item())  # the only wait for the device in this method
        bad = self._communicator.all_reduce(torch.tensor([0 if finite else 1], dtype=torch.int64), maximum=True)
        return int(bad.item()) == 0

    def _of_parameters(
        self, flat: FlatUpdate, norm_type: float, unscale: Tensor | None, clips: Transform, order: dict[int, int]
    ) -> list[tuple[int, Tensor]]:
        present = flat.gradient.view.present()
        norms = parameter_norms(
            flat.states,
            _reader(flat),
            present,
            norm_type=norm_type,
            dtype=_dtype(flat),
            transform=_so_far(flat, unscale, clips),
        )
        _done_reading(flat)
        computed = iter(norms)
        return [
            # Empty parameters count with a zero norm: the number of norms decides how their sum rounds.
            (order[id(parameter)], next(computed) if parameter.numel() else torch.zeros((), dtype=_dtype(flat)))
            for slot, parameter in enumerate(flat.store.binding.parameters)
            if present[slot] and flat.states.groups[slot] is not None
        ]


def _reader(flat: FlatUpdate) -> GradientReader:
    """A flat's gradient for a short read; `_done_reading` must follow."""
    if not flat.gradient.in_place:
        return TensorGradient(flat.gradient.shard.on_device())
    return ParameterGradients(flat.store.binding.arrangement.in_orders(flat.gradient.view.gradients()))


def _done_reading(flat: FlatUpdate) -> None:
    if not flat.gradient.in_place:
        flat.gradient.shard.settle()


def _so_far(flat: FlatUpdate, unscale: Tensor | None, clips: Transform) -> Transform:
    """The transform that the update would apply now, without further clips."""
    return dataclasses.replace(clips if flat.gradient.view.clipped_later else NO_TRANSFORM, unscale=unscale)


def _dtype(flat: FlatUpdate) -> torch.dtype:
    master = flat.states.master
    return flat.store.binding.dtype if master is None else master.dtype


def _unscale(scale: LossScale | None) -> Tensor | None:
    return None if scale is None else scale.unscale_factor()
