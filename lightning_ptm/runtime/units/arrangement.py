"""How parameters lie in a flat: which elements are whose, and in which order they follow each other.

Owns nothing that changes. Knows shapes and strides, not whether anything is bound.

I1: a flat holds a parameter's elements in the order of its memory, not of its shape: one that is transposed or channels_last
stays so, since kernels are chosen, and fused updates round, by it.
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
    """Of one flat; by slot.

    Attributes:
        shapes: of the parameters.
        orders: the dimensions as their elements follow each other, where that is not the order of the shape.
    """

    layout: FlatLayout
    shapes: tuple[tuple[int, ...], ...]
    orders: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def of(cls, layout: FlatLayout, parameters: Sequence[Tensor]) -> Arrangement:
        """Of these parameters, one for each slot."""
        shapes = tuple(tuple(parameter.shape) for parameter in parameters)
        return cls(layout, shapes, tuple(slot.spec.order for slot in layout.slots))

    @property
    def boxes(self) -> list[TensorSlice | None]:
        """By slot, which part of a larger one the parameter is."""
        return [slot.spec.box for slot in self.layout.slots]

    def fits(self, slot: int, value: Tensor) -> bool:
        """Whether `value` can be that of a slot's parameter, or of the larger one that it is a part of."""
        return tuple(value.shape) in (self.shapes[slot], self.layout.slots[slot].spec.whole_shape)

    def view(self, full: Tensor, slot: int) -> Tensor:
        """The parameter of `slot` as a view of `full` (padded_numel,)."""
        place = self.layout.slots[slot]
        if place.spec.stride is not None:
            return full.as_strided(self.shapes[slot], place.spec.stride, full.storage_offset() + place.start)
        return full[place.start : place.start + place.numel].view(self.shapes[slot])

    def in_order(self, slot: int, value: Tensor) -> Tensor:
        """The elements of `value`, which has the shape of the parameter of `slot`, as they follow each other in the flat: a
        view where they lie so, else a copy."""
        order = self.orders[slot]
        return value.reshape(-1) if order is None else value.permute(order).reshape(-1)

    def as_laid(self, values: Sequence[Tensor | None]) -> list[Tensor | None]:
        """As `in_order`, for values of all parameters; where one is a part of a larger one, in the shape that they have."""
        return [
            each if each is None else self.in_order(slot, each) if box is None else each.contiguous()
            for slot, (each, box) in enumerate(zip(values, self.boxes, strict=True))
        ]

    def in_orders(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """As `in_order`, for gradients of all parameters. Raises as `check_dense`."""
        return [None if each is None else self._gradient(slot, each) for slot, each in enumerate(gradients)]

    def _gradient(self, slot: int, gradient: Tensor) -> Tensor:
        self.check_dense(slot, gradient)
        # What is of another shape is refused, by whoever reads it.
        return self.in_order(slot, gradient) if tuple(gradient.shape) == self.shapes[slot] else gradient

    def check_dense(self, slot: int, gradient: Tensor) -> None:
        """Raises UsageError: the gradient of the parameter of `slot` is sparse, and pages hold dense ones."""
        if gradient.layout is not torch.strided:
            kind = str(gradient.layout).removeprefix("torch.")
            raise UsageError(
                f"the gradient of {self.layout.slots[slot].spec.name} is sparse ({kind}), and pages hold dense gradients; "
                f"use sparse=False in its embedding"
            )
