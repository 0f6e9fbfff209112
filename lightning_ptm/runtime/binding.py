"""The only code that touches a parameter's storage (`param.data`).

Owns the link between one flat's layout and the parameters that are views of it. Knows tensors, never tiers or plans.

I1: a bound parameter is a view of the flat it was last bound to; a released one is one NaN expanded to its shape, so
that reading it shows and writing it raises: at once from torch, but for `fill_` and `zero_`, which raise at the next use.
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
    """One flat of a unit and its parameters, in the order of the layout's slots.

    Args:
        is_copy: the parameters are copies of masters, so what is written into them by hand would be lost.
    """

    def __init__(
        self,
        layout: FlatLayout,
        parameters: list[nn.Parameter],
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_copy: bool = False,
    ) -> None:
        if len(parameters) != len(layout.slots):
            raise InternalError(f"flat {layout.index} has {len(layout.slots)} slots and {len(parameters)} parameters")
        self.layout = layout
        self.parameters = parameters
        self.dtype = dtype
        self.device = device
        self._shapes = [tuple(parameter.shape) for parameter in parameters]
        self._nan = torch.full((), float("nan"), dtype=dtype, device=device)
        self._is_copy = is_copy
        self._base: Tensor | None = None
        self._versions: list[int] = []

    @property
    def bound(self) -> bool:
        return self._base is not None

    @property
    def released_address(self) -> int:
        """Where the one NaN lies that all of the flat's released parameters show."""
        return self._nan.data_ptr()

    def shape(self, slot: int) -> tuple[int, ...]:
        """The shape of the parameter of `slot`."""
        return self._shapes[slot]

    def view(self, full: Tensor, slot: int) -> Tensor:
        """The parameter of `slot` as a view of `full` (padded_numel,)."""
        place = self.layout.slots[slot]
        return full[place.start : place.start + place.numel].view(self._shapes[slot])

    def bind(self, full: Tensor) -> None:
        """Makes the parameters views of `full`, a 1-D tensor of at least padded_numel elements."""
        self._check_unwritten()
        for slot, parameter in enumerate(self.parameters):
            self._check_shape(slot)
            parameter.data = self.view(full, slot)
        self._base = full
        self._versions = [parameter._version for parameter in self.parameters]

    def unbind(self) -> None:
        """Lets go of the flat; the parameters read as NaN until they are bound again."""
        for slot, parameter in enumerate(self.parameters):
            self._check_shape(slot)
            parameter.data = self._nan.expand(self._shapes[slot])
        self._base = None

    def check(self) -> None:
        """Refuses parameters that somebody else has given other storage (I1) or written to: the values would be lost.

        Raises:
            UsageError: `parameter.data` was replaced, by a tensor of another shape or of the same; or a copy of a master
                was written to in place. (A write through `parameter.data` leaves no trace.)
        """
        for slot, parameter in enumerate(self.parameters):
            self._check_shape(slot)
            place = self.layout.slots[slot]
            ours = self._nan if self._base is None else self._base[place.start :]
            replaced = place.numel and parameter.data_ptr() != ours.data_ptr()
            written = self._is_copy and self._base is not None and parameter._version != self._versions[slot]
            if replaced or written:
                raise UsageError(
                    f"the data of parameter {place.spec.name} was {'replaced' if replaced else 'written to'}, and its "
                    f"{'pages know' if replaced else 'fp32 master knows'} nothing of it, so the new values would be lost; "
                    f"edit parameters inside `with strategy.gathered(module):`"
                )

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

    def _check_unwritten(self) -> None:
        # Not on a GPU: it would stop the host.
        if self._nan.device.type == "cpu" and not bool(self._nan.isnan()):
            names = ", ".join(slot.spec.name for slot in self.layout.slots[:3])
            self._nan.fill_(float("nan"))
            raise UsageError(
                f"a parameter among {names}... was written to (fill_, zero_, nn.init.zeros_...) while its pages were "
                f"released, so the values are lost; edit parameters inside `with strategy.gathered(module):`"
            )

    def _check_shape(self, slot: int) -> None:
        if tuple(self.parameters[slot].shape) != self._shapes[slot]:
            name = self.layout.slots[slot].spec.name
            raise UsageError(
                f"parameter {name} had shape {self._shapes[slot]} at set-up and has {tuple(self.parameters[slot].shape)} "
                f"now; its pages do not fit it any more; change shapes before fit() starts, or build a new Trainer"
            )
