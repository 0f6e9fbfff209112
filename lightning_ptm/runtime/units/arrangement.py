"""Arrangement of parameters in a flat: which elements belong to each parameter, and their order.

Immutable. Knows shapes and strides, not whether parameters are bound.

I1: a flat stores a parameter's elements in the order of its memory, not of its shape: a transposed or channels_last parameter
    stays so, since the choice of kernels and the rounding of fused updates depend on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ptm.errors import UsageError
from lightning_ptm.planning.layout import FlatLayout
from lightning_ptm.planning.tensor_slices import TensorSlice


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """Arrangement of one flat's parameters; sequences are indexed by slot.

    Attributes:
        shapes: shapes of the parameters.
        orders: dimensions from the slowest to the fastest in memory; None for row-major parameters.
    """

    layout: FlatLayout
    shapes: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, layout: FlatLayout, parameters: Sequence[Tensor]) -> Arrangement:
        """Returns the arrangement of parameters, one for each slot."""
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        return cls(layout, shapes, tuple(slot.spec.order for slot in layout.slots))

    @property
    def boxes(self) -> list[TensorSlice | None]:
        """Slices of larger parameters, by slot; None for whole parameters."""
        return [slot.spec.box for slot in self.layout.slots]

    def fits(self, slot: int, value: Tensor) -> bool:
        """Whether `value` has the shape of a slot's parameter, or of the larger one that it is a slice of."""
        return tuple(value.shape) in (self.shapes[slot], self.layout.slots[slot].spec.whole_shape)

    def view(self, full: Tensor, slot: int) -> Tensor:
        """Returns the parameter of `slot` as a view of `full` (padded_numel,)."""
        place = self.layout.slots[slot]
        if place.spec.stride is not None:
            return full.as_strided(self.shapes[slot], place.spec.stride, full.storage_offset() + place.start)
        return full[place.start : place.start + place.numel].view(self.shapes[slot])

    def in_order(self, slot: int, value: Tensor) -> Tensor:
        """Returns the elements of `value` (shaped as the parameter of `slot`) in the flat's order: a view if possible, else a
        copy."""
        order = self.orders[slot]
        return value.reshape(-1) if order is None else value.permute(order).reshape(-1)

    def as_laid(self, values: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Arranges values of all parameters, as `in_order`; values of slices keep their shape and are made
        contiguous."""
        return [
            each if each is None else self.in_order(slot, each) if box is None else each.contiguous()
            for slot, (each, box) in enumerate(zip(values, self.boxes, strict=True))
        ]

    def in_orders(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Arranges gradients of all parameters, as `in_order`. Raises UsageError as `check_dense`."""
        return [None if each is None else self._gradient(slot, each) for slot, each in enumerate(gradients)]

    def _gradient(self, slot: int, gradient: Tensor) -> Tensor:
        self.check_dense(slot, gradient)
        # The reader refuses gradients of another shape.
        return self.in_order(slot, gradient) if tuple(gradient.shape) == self.shapes[slot] else gradient

    def check_dense(self, slot: int, gradient: Tensor) -> None:
        """Raises UsageError if the gradient of the parameter of `slot` is sparse: pages hold dense gradients only."""
        if gradient.layout is not torch.strided:
            kind = str(gradient.layout).removeprefix("torch.")
            raise UsageError(
                f"the gradient of {self.layout.slots[slot].spec.name} is sparse ({kind}), and pages hold dense gradients; "
                f"use sparse=False in its embedding"
            )
