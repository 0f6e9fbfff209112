"""The only code that touches a parameter's storage (`param.data`).

Owns the link between one flat's layout and the parameters that are views of it. Knows tensors, never tiers or plans.

I1: a bound parameter is a view of the flat it was last bound to; a released one is one NaN expanded to its shape, so
that reading it shows and writing it raises.
I2: shape and identity of a parameter never change; its dtype changes once, to the compute dtype.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from lightning_ptm.errors import InternalError, UsageError
from lightning_ptm.planning.layout import FlatLayout


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """A saved tensor that is a view of a flat, named instead of kept (section 4 of the design)."""

    unit: int
    flat: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class FlatBinding:
    """One flat of a unit and its parameters, in the order of the layout's slots."""

    def __init__(
        self, layout: FlatLayout, parameters: list[nn.Parameter], dtype: torch.dtype, device: torch.device
    ) -> None:
        if len(parameters) != len(layout.slots):
            raise InternalError(f"flat {layout.index} has {len(layout.slots)} slots and {len(parameters)} parameters")
        self.layout = layout
        self.parameters = parameters
        self.dtype = dtype
        self.device = device
        self._shapes = [tuple(parameter.shape) for parameter in parameters]
        self._nan = torch.full((), float("nan"), dtype=dtype, device=device)
        self._base: Tensor | None = None

    @property
    def bound(self) -> bool:
        return self._base is not None

    def view(self, full: Tensor, slot: int) -> Tensor:
        """The parameter of `slot` as a view of `full` (padded_numel,)."""
        place = self.layout.slots[slot]
        return full[place.start : place.start + place.numel].view(self._shapes[slot])

    def bind(self, full: Tensor) -> None:
        """Makes the parameters views of `full`, a 1-D tensor of at least padded_numel elements."""
        for slot, parameter in enumerate(self.parameters):
            self._check_shape(slot)
            parameter.data = self.view(full, slot)
        self._base = full

    def unbind(self) -> None:
        """Lets go of the flat; the parameters read as NaN until they are bound again."""
        for slot, parameter in enumerate(self.parameters):
            self._check_shape(slot)
            parameter.data = self._nan.expand(self._shapes[slot])
        self._base = None

    def restore(self, slot: int, value: Tensor) -> None:
        """Gives a parameter storage of its own again (end of a run)."""
        self.parameters[slot].data = value

    def pack(self, tensor: Tensor) -> Packed | None:
        """Names `tensor` if it lies inside the bound flat."""
        if self._base is None or tensor.dtype != self.dtype:
            return None
        offset = tensor.data_ptr() - self._base.data_ptr()
        if not 0 <= offset < self.layout.padded_numel * self.layout.itemsize:
            return None
        return Packed(
            self.layout.unit,
            self.layout.index,
            offset // self.layout.itemsize,
            tuple(tensor.shape),
            tuple(tensor.stride()),
        )

    def unpack(self, packed: Packed) -> Tensor:
        if self._base is None:
            raise InternalError(f"unit {packed.unit} is not gathered while a saved tensor of it is read")
        start = self._base.storage_offset() + packed.offset
        return torch.as_strided(self._base, packed.shape, packed.stride, start)

    def _check_shape(self, slot: int) -> None:
        if tuple(self.parameters[slot].shape) != self._shapes[slot]:
            name = self.layout.slots[slot].spec.name
            raise UsageError(
                f"parameter {name} had shape {self._shapes[slot]} at set-up and has {tuple(self.parameters[slot].shape)} "
                f"now; its pages do not fit it any more; change shapes before fit() starts, or build a new Trainer"
            )
