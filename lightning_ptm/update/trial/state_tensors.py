"""State tensors of an optimizer as a reference run shows them, and why pages cannot hold some."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from lightning_ptm.torch_internals import TorchDispatchMode, packet_of, tree_leaves
from lightning_ptm.update.shadow import hyperparameters_of, undecorated_step
from lightning_ptm.update.trial.parameters import settings_of
from lightning_ptm.update.trial.runs import ReferenceRun, clone_with
from lightning_ptm.update.trial.traits import (
    GroupTraits,
    Initial,
    OptimizerTraits,
    Shape,
    SlotTraits,
    StateShapes,
    same_value,
)

_NUMBERS = (torch.Tensor, int, float, complex, bool, str, type(None))


class MissingProperty(Exception):
    """A property that pages need and the optimizer lacks; the text says which."""


class RaisesInTrial(MissingProperty):
    """An error of the optimizer's own on the parameters of the trial."""


def error_text(error: Exception) -> str:
    """An error of an optimizer's code, in a phrase."""
    return f"{type(error).__name__}: {error}"


def shapes_in(state: Mapping[str, Any]) -> StateShapes:
    """Shapes of those states of a parameter that are tensors of several elements."""
    many = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
    return MappingProxyType({key: tuple(value.shape) for key, value in many.items()})


def elementwise_slots(reference: ReferenceRun, members: Sequence[int]) -> tuple[SlotTraits, ...]:
    """States with one number for each element that parameters at these places have, the same in every step."""
    found: dict[str, SlotTraits] = {}
    for step in range(len(reference.trial.steps)):
        for place in members:
            spec = reference.trial.parameters[place]
            slots, scalars = reference.slots[step][place], reference.scalars[step][place]
            for key, value in slots.items():
                if value.shape != spec.shape:
                    raise MissingProperty(
                        f"for a parameter of shape {spec.shape} it keeps {key!r} of shape {tuple(value.shape)}"
                    )
                if type(value) is not torch.Tensor:
                    raise MissingProperty(f"it keeps {key!r} as a {type(value).__name__}, whose elements share numbers")
                if found.setdefault(key, SlotTraits(key, value.dtype)).dtype != value.dtype:
                    raise MissingProperty(
                        f"it keeps {key!r} in {value.dtype} for a parameter of shape {spec.shape}, and in "
                        f"{found[key].dtype} for others"
                    )
            for key, value in scalars.items():
                if not isinstance(value, _NUMBERS):
                    raise MissingProperty(f"it keeps {key!r}, a {type(value).__name__}, for each parameter")
                if isinstance(value, torch.Tensor) and value.numel() != 1:
                    raise MissingProperty(
                        f"for a parameter of shape {spec.shape} it keeps {key!r} of shape {tuple(value.shape)}"
                    )
            if slots.keys() != reference.slots[0][place].keys():
                late = sorted(slots.keys() ^ reference.slots[0][place].keys())
                raise MissingProperty(
                    f"it makes or drops its state {', '.join(late)} in step {step + 1}, and not in the first"
                )
    for place in members:
        if reference.slots[0][place].keys() != found.keys():
            other = next(each for each in members if reference.slots[0][each].keys() - reference.slots[0][place].keys())
            raise MissingProperty(
                f"for a parameter of shape {reference.trial.parameters[place].shape} it keeps other states than for one of "
                f"shape {reference.trial.parameters[other].shape}"
            )
    return tuple(found.values())


def whole_parameter_slots(
    reference: ReferenceRun, members: Sequence[int]
) -> tuple[tuple[SlotTraits, ...], dict[Shape, StateShapes]]:
    """Returns the states with several elements that the parameters at indices `members` keep, one entry per name, and
    the shapes of these states by shape of the parameter. Every step must keep the same states."""
    found: dict[str, SlotTraits] = {}
    shapes: dict[Shape, StateShapes] = {}
    for place in members:
        shape = reference.trial.parameters[place].shape
        for step in range(len(reference.trial.steps)):
            state = {**reference.slots[step][place], **reference.scalars[step][place]}
            for key, value in state.items():
                if not isinstance(value, _NUMBERS):
                    raise MissingProperty(f"it keeps {key!r}, a {type(value).__name__}, for each parameter")
                if not isinstance(value, torch.Tensor) or value.numel() < 2:
                    continue
                if type(value) is not torch.Tensor:
                    raise MissingProperty(f"it keeps {key!r} as a {type(value).__name__}")
                if found.setdefault(key, SlotTraits(key, value.dtype)).dtype != value.dtype:
                    raise MissingProperty(
                        f"it keeps {key!r} in {value.dtype} for some parameters, and in {found[key].dtype} for others"
                    )
            now = shapes_in(state)
            if now != shapes.setdefault(shape, now):
                late = sorted(
                    key for key in now.keys() | shapes[shape].keys() if now.get(key) != shapes[shape].get(key)
                )
                raise MissingProperty(
                    f"it makes or drops its state {', '.join(late)} in step {step + 1}, and not in the first"
                )
    return tuple(found.values()), shapes


@dataclasses.dataclass(frozen=True, slots=True)
class GroupChanges:
    """Keys of parameter groups that steps change, or whose values are containers, found by a trial.

    Attributes:
        advanced: keys whose numbers a step changes.
        created: keys that a step creates.
        containers: keys whose values are lists or dictionaries.
    """

    advanced: tuple[str, ...]
    created: frozenset[str]
    containers: tuple[str, ...]


def group_changes(reference: ReferenceRun) -> GroupChanges:
    """Returns the changes that steps make to parameter groups."""
    advanced, created, containers = dict[str, None](), set[str](), dict[str, None]()
    for after in reference.groups:
        for before, now in zip(reference.trial.groups, after, strict=True):
            for key, value in now.items():
                if key == "lr":
                    continue
                if isinstance(value, list | dict | set):
                    containers[key] = None
                    if key not in before:
                        raise MissingProperty(f"its step makes group value {key!r}, a {type(value).__name__}")
                elif key not in before or not same_value(value, before[key]):
                    advanced[key] = None
                    if not _is_number(value):
                        raise MissingProperty(f"its step changes group value {key!r}, which is no number")
                if key not in before:
                    created.add(key)
    return GroupChanges(tuple(advanced), frozenset(created), tuple(containers))


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (*_NUMBERS, tuple))


class MatmulFlops(TorchDispatchMode):
    """Counts the operations of matrix products while it is entered.

    Attributes:
        flops: so far, by the dtype that products are computed in; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = packet_of(func)
        # Torch has formulas for `addmm`, and none for `addmm_`.
        formula = flop_registry.get(packet) or flop_registry.get(
            getattr(torch.ops.aten, packet.__name__.rstrip("_"), None)
        )
        if formula is not None:
            dtype = next(leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.flops[dtype] += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


def with_state_shapes(
    optimizer: Optimizer, traits: OptimizerTraits, groups: Sequence[GroupTraits], dtype: torch.dtype
) -> list[GroupTraits]:
    """Traits of the user's groups with the states that their own parameters will have.

    Args:
        traits: as the trial has found them.
        groups: for each of the user's groups, those of one like it in the trial.
        dtype: of parameters while they are updated.

    Raises:
        MissingProperty: a parameter would have states that those of the trial have not, or is not contiguous.
    """
    dtypes = {slot.name: slot.dtype for slot in traits.slots}
    known: dict[tuple[Any, ...], tuple[dict[Shape, StateShapes], dict[Shape, Mapping[torch.dtype, int]]]] = {}
    found = []
    for group, settings in zip(groups, optimizer.param_groups, strict=True):
        # Groups of equal settings share what is found.
        state_shapes, matmul_flops = known.setdefault(settings_of(settings), (dict(group.state_shapes), {}))
        for parameter in settings["params"]:
            shape = tuple(parameter.shape)
            if not parameter.requires_grad or shape in matmul_flops:
                continue
            if not parameter.is_contiguous() and 0 not in parameter.stride():
                raise MissingProperty(
                    f"{traits.whole}, and a parameter of shape {shape} has strides {parameter.stride()} (channels_last, or "
                    f"transposed), where whole ones are updated row by row"
                )
            try:
                state, matmul_flops[shape] = _first_states(
                    optimizer, traits, group, settings, torch.empty(shape, dtype=dtype, device="meta")
                )
            except Exception as error:
                raise RaisesInTrial(f"on a parameter of shape {shape} it raises {error_text(error)}") from error
            state_shapes[shape] = shapes_in(state)
            for name in state_shapes[shape]:
                if dtypes.get(name) is not state[name].dtype:
                    raise MissingProperty(
                        f"it keeps {name!r} in {state[name].dtype} for a parameter of shape {shape} alone"
                    )
        found.append(dataclasses.replace(group, state_shapes=state_shapes, matmul_flops=matmul_flops))
    return found


def _first_states(
    optimizer: Optimizer, traits: OptimizerTraits, group: GroupTraits, settings: Mapping[str, Any], like: torch.Tensor
) -> tuple[dict[str, Any], Mapping[torch.dtype, int]]:
    """States of a parameter like `like` after its first step, of which shapes and dtypes count, and operations of the step's
    matrix products."""
    found: dict[str, Any] = {}
    counted = MatmulFlops()
    with contextlib.suppress(Exception), counted:
        # Without memory: of a large parameter a first step would take seconds, and several times its bytes.
        _first_step(optimizer, traits.initial, settings, like, found)
        return found, counted.flops
    # A class that asks for a number of its parameter raises there, most often when it has made its states.
    if found and {*found} in ({*shapes, *group.scalars} for shapes in group.state_shapes.values()):
        return found, counted.flops
    found, counted = {}, MatmulFlops()
    with counted:
        _first_step(optimizer, traits.initial, settings, torch.ones_like(like, device=traits.device), found)
    return found, counted.flops


def _first_step(
    optimizer: Optimizer, initial: Initial, group: Mapping[str, Any], value: torch.Tensor, found: dict[str, Any]
) -> None:
    """Take a first step and put the states that it makes into `found`, also where it raises."""
    parameter = torch.nn.Parameter(value)
    parameter.grad = torch.ones_like(parameter)  # some classes make nothing of zeros
    used = clone_with(optimizer, initial, [{"params": [parameter], **hyperparameters_of(group)}])
    try:
        undecorated_step(type(used))(used, closure=lambda: torch.zeros(()))
    finally:
        found.update(used.state.get(parameter, {}))


def has_other_states(traits: OptimizerTraits, reference: ReferenceRun, place: int) -> bool:
    """Whether a parameter of a trial has other states after its first step than these traits say."""
    spec = reference.trial.parameters[place]
    group = traits.groups[spec.group]
    if traits.whole:
        return shapes_in({**reference.slots[0][place], **reference.scalars[0][place]}) != group.state_shapes[spec.shape]
    return {slot.name for slot in group.slots} != reference.slots[0][place].keys()


def smallest_shape(shapes: Collection[Shape]) -> Shape:
    """The shape of the fewest elements."""
    return min(shapes, key=math.prod)
