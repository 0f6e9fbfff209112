"""Traits of an optimizer that the probe finds: plain facts, no behaviour.

Knows torch dtypes and nothing of pages, flats or threads.
I1: a slot of an element-wise optimizer has the shape of its parameter, and element i depends on element i alone.
I2: a scalar of one does not depend on the parameter's elements, so every piece of a parameter goes through the same scalars.
I3: of an optimizer that updates whole parameters, states have shapes of their own, and scalars are each parameter's.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from collections.abc import Mapping
from typing import Any

import torch

from lightning_ptm.update.state_encoding import Encoding


class Initial(enum.Enum):
    """Ways in which a parameter gets its first state."""

    LAZY = "lazy"
    """The class fills an empty state inside the first `step`, as nearly all do."""
    CONSTRUCTED = "constructed"
    """The class fills it in its constructor and needs it there."""


@dataclasses.dataclass(frozen=True, slots=True)
class SlotTraits:
    """One state tensor of parameters (`exp_avg`, `momentum_buffer`...).

    Attributes:
        dtype: dtype in which the optimizer computes it.
        encoding: its encoding in pages; None: it is stored in `dtype`.
    """

    name: str
    dtype: torch.dtype
    encoding: type[Encoding] | None = None


Shape = tuple[int, ...]
StateShapes = Mapping[str, Shape]
"""The shape of each state, by its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupTraits:
    """States that the optimizer keeps for a parameter of one parameter group (groups may differ, e.g. in `amsgrad`)."""

    slots: tuple[SlotTraits, ...]
    scalars: tuple[str, ...]
    fused: bool
    """The class offers `fused`, the user left it open, and it works here: run it fused."""
    must_stay_zero: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Hyper-parameters that are 0 and must stay 0, each with what the update would do otherwise."""
    state_shapes: Mapping[Shape, StateShapes] = dataclasses.field(default_factory=dict)
    """By shape of a parameter that is updated whole, the shapes of its states; states of one element are scalars."""
    matmul_flops: Mapping[Shape, Mapping[torch.dtype, int]] = dataclasses.field(default_factory=dict)
    """By shape of a parameter that is updated whole, operations of its update's matrix products, by their dtype."""
    scalars_beside: frozenset[str] = frozenset()
    """Scalars that are tensors on the device of the parameter; others are in RAM, or numbers."""
    example_shape: Shape = (64,)
    """The shape of a small parameter that the group can have, for trial steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerTraits:
    """Traits of one optimizer instance: its states, and how its `step` behaves.

    Unless it updates whole parameters, its update may be cut anywhere between elements whose distance from their parameter's
    first is a multiple of ALIGN_NUMEL: kernels take whole vectors of them there.

    Attributes:
        name: qualified class name, for messages.
        groups: one entry per parameter group, in the optimizer's order.
        initial: how the first state is created.
        device: where it was tried, and where its updates run.
        group_slots: keys of a parameter group that `step` itself advances (Apex FusedAdam's `step`).
        created: those of `group_slots` that do not exist before the first step.
        group_containers: keys of parameter groups that hold lists or dictionaries.
        changed_attributes: attributes of the object that `step` changes; the update does not depend on them.
        closure: whether `step` requires a closure.
        ignores_closure: `step` never calls the one that it is given.
        holds_parameters: `step` has looked up what to update before it calls its closure.
        writes_gradient: `step` uses the gradient as scratch.
        every_gradient: why every parameter needs a gradient in every step; empty: it does not.
        whole: why the update of a parameter needs all of it at once, and of no other; empty: it is element-wise.
    """

    name: str
    groups: tuple[GroupTraits, ...]
    initial: Initial
    device: torch.device
    group_slots: tuple[str, ...] = ()
    created: frozenset[str] = frozenset()
    group_containers: tuple[str, ...] = ()
    changed_attributes: tuple[str, ...] = ()
    closure: bool = False
    ignores_closure: bool = False
    holds_parameters: bool = False
    writes_gradient: bool = False
    every_gradient: str = ""
    whole: str = ""

    @property
    def slots(self) -> tuple[SlotTraits, ...]:
        """Every group's slots, each name once, in the order of first appearance."""
        found: dict[str, SlotTraits] = {}
        for group in self.groups:
            for slot in group.slots:
                found.setdefault(slot.name, slot)
        return tuple(found.values())

    def bytes_per_element(self) -> int:
        """Bytes of optimizer state per parameter element: neither of the master parameter, nor of what is encoded, nor of
        what has shapes of its own."""
        return 0 if self.whole else sum(slot.dtype.itemsize for slot in self.slots if slot.encoding is None)

    def encoded(self, encodings: Mapping[str, type[Encoding] | None]) -> OptimizerTraits:
        """Returns these traits with the given encodings, by slot name (None: not encoded)."""

        def slots(group: GroupTraits) -> GroupTraits:
            changed = (dataclasses.replace(slot, encoding=encodings.get(slot.name)) for slot in group.slots)
            return dataclasses.replace(group, slots=tuple(changed))

        return dataclasses.replace(self, groups=tuple(map(slots, self.groups)))

    def own_bytes(self, group: int, shape: Shape) -> int:
        """Bytes of the states of own shapes of a parameter of this shape."""
        dtypes = {slot.name: slot.dtype for slot in self.slots}
        state_shapes = self.groups[group].state_shapes[shape] if self.whole else {}
        return sum(math.prod(own) * dtypes[name].itemsize for name, own in state_shapes.items())


def same_value(first: Any, second: Any) -> bool:
    """Bitwise equality of two scalars, slots or hyper-parameters, where NaN equals NaN."""
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return (
            first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(_bits(first), _bits(second.to(first.device)))
        )
    if isinstance(first, numbers.Number) and isinstance(second, numbers.Number):
        return type(first) is type(second) and (first == second or (first != first and second != second))
    if isinstance(first, list | tuple) and type(first) is type(second):
        return len(first) == len(second) and all(map(same_value, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same_value(value, second[key]) for key, value in first.items())
    return bool(type(first) is type(second) and first == second)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
