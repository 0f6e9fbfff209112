"""What an optimizer keeps, as a run of its trial shows it, and why pages could not keep it."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_ptm.update.shadow import own_values, undecorated_step
from lightning_ptm.update.trial.parameters import settings_of
from lightning_ptm.update.trial.runs import Whole, clone_with
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


class Lacks(Exception):
    """The optimizer lacks a property that pages need; the text says which."""


class Raises(Lacks):
    """It raises on the parameters of the trial."""


def told(error: Exception) -> str:
    """An error of foreign code, in a phrase."""
    return f"{type(error).__name__}: {error}"


def kept_shapes(state: Mapping[str, Any]) -> StateShapes:
    """Shapes of those states of a parameter that are tensors of several elements."""
    many = {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and value.numel() > 1}
    return MappingProxyType({key: tuple(value.shape) for key, value in many.items()})


def slots_of(whole: Whole, members: Sequence[int]) -> tuple[SlotTraits, ...]:
    """States with one number for each element that parameters at these places have, the same in every step."""
    found: dict[str, SlotTraits] = {}
    for step in range(len(whole.trial.steps)):
        for place in members:
            specimen = whole.trial.specimens[place]
            slots, scalars = whole.slots[step][place], whole.scalars[step][place]
            for key, value in slots.items():
                if value.shape != specimen.shape:
                    raise Lacks(
                        f"for a parameter of shape {specimen.shape} it keeps {key!r} of shape {tuple(value.shape)}"
                    )
                if type(value) is not torch.Tensor:
                    raise Lacks(f"it keeps {key!r} as a {type(value).__name__}, whose elements share numbers")
                if found.setdefault(key, SlotTraits(key, value.dtype)).dtype != value.dtype:
                    raise Lacks(
                        f"it keeps {key!r} in {value.dtype} for a parameter of shape {specimen.shape}, and in "
                        f"{found[key].dtype} for others"
                    )
            for key, value in scalars.items():
                if not isinstance(value, _NUMBERS):
                    raise Lacks(f"it keeps {key!r}, a {type(value).__name__}, for each parameter")
                if isinstance(value, torch.Tensor) and value.numel() != 1:
                    raise Lacks(
                        f"for a parameter of shape {specimen.shape} it keeps {key!r} of shape {tuple(value.shape)}"
                    )
            if slots.keys() != whole.slots[0][place].keys():
                late = sorted(slots.keys() ^ whole.slots[0][place].keys())
                raise Lacks(f"it makes or drops its state {', '.join(late)} in step {step + 1}, and not in the first")
    for place in members:
        if whole.slots[0][place].keys() != found.keys():
            other = next(each for each in members if whole.slots[0][each].keys() - whole.slots[0][place].keys())
            raise Lacks(
                f"for a parameter of shape {whole.trial.specimens[place].shape} it keeps other states than for one of "
                f"shape {whole.trial.specimens[other].shape}"
            )
    return tuple(found.values())


def own_slots_of(whole: Whole, members: Sequence[int]) -> tuple[tuple[SlotTraits, ...], dict[Shape, StateShapes]]:
    """States of several elements that parameters at these places have, in whatever shapes, the same in every step: each name
    once, and their shapes by that of the parameter."""
    found: dict[str, SlotTraits] = {}
    shapes: dict[Shape, StateShapes] = {}
    for place in members:
        shape = whole.trial.specimens[place].shape
        for step in range(len(whole.trial.steps)):
            state = {**whole.slots[step][place], **whole.scalars[step][place]}
            for key, value in state.items():
                if not isinstance(value, _NUMBERS):
                    raise Lacks(f"it keeps {key!r}, a {type(value).__name__}, for each parameter")
                if not isinstance(value, torch.Tensor) or value.numel() < 2:
                    continue
                if type(value) is not torch.Tensor:
                    raise Lacks(f"it keeps {key!r} as a {type(value).__name__}")
                if found.setdefault(key, SlotTraits(key, value.dtype)).dtype != value.dtype:
                    raise Lacks(
                        f"it keeps {key!r} in {value.dtype} for some parameters, and in {found[key].dtype} for others"
                    )
            now = kept_shapes(state)
            if now != shapes.setdefault(shape, now):
                late = sorted(
                    key for key in now.keys() | shapes[shape].keys() if now.get(key) != shapes[shape].get(key)
                )
                raise Lacks(f"it makes or drops its state {', '.join(late)} in step {step + 1}, and not in the first")
    return tuple(found.values()), shapes


def group_values(whole: Whole) -> tuple[tuple[str, ...], frozenset[str], tuple[str, ...]]:
    """What steps do to groups: the values that they change, those that they make, and those that are containers."""
    advanced, created, containers = dict[str, None](), set[str](), dict[str, None]()
    for after in whole.groups:
        for before, now in zip(whole.trial.groups, after, strict=True):
            for key, value in now.items():
                if key == "lr":
                    continue
                if isinstance(value, list | dict | set):
                    containers[key] = None
                    if key not in before:
                        raise Lacks(f"its step makes group value {key!r}, a {type(value).__name__}")
                elif key not in before or not same_value(value, before[key]):
                    advanced[key] = None
                    if not _is_number(value):
                        raise Lacks(f"its step changes group value {key!r}, which is no number")
                if key not in before:
                    created.add(key)
    return tuple(advanced), frozenset(created), tuple(containers)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (*_NUMBERS, tuple))


class CountedProducts(TorchDispatchMode):
    """While it is entered, operations of products by the dtype that they are computed in.

    Attributes:
        flops: so far; a multiplication and an addition are two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        # Torch has formulas for `addmm`, and none for `addmm_`.
        formula = flop_registry.get(packet) or flop_registry.get(
            getattr(torch.ops.aten, packet.__name__.rstrip("_"), None)
        )
        if formula is not None:
            dtype = next(leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.flops[dtype] += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


def with_own_shapes(
    optimizer: Optimizer, traits: OptimizerTraits, groups: Sequence[GroupTraits], dtype: torch.dtype
) -> list[GroupTraits]:
    """Traits of the user's groups with the states that their own parameters will have.

    Args:
        traits: as the trial has found them.
        groups: for each of the user's groups, those of one like it in the trial.
        dtype: of parameters while they are updated.

    Raises:
        Lacks: a parameter would keep what parameters of the trial do not, or lies otherwise than row by row.
    """
    dtypes = {slot.name: slot.dtype for slot in traits.slots}
    known: dict[tuple[Any, ...], tuple[dict[Shape, StateShapes], dict[Shape, Mapping[torch.dtype, int]]]] = {}
    found = []
    for group, settings in zip(groups, optimizer.param_groups, strict=True):
        # Groups of equal settings know each other's.
        kept, products = known.setdefault(settings_of(settings), (dict(group.kept), {}))
        for parameter in settings["params"]:
            shape = tuple(parameter.shape)
            if not parameter.requires_grad or shape in products:
                continue
            if not parameter.is_contiguous() and 0 not in parameter.stride():
                raise Lacks(
                    f"{traits.whole}, and a parameter of shape {shape} has strides {parameter.stride()} (channels_last, or "
                    f"transposed), where whole ones are updated row by row"
                )
            try:
                state, products[shape] = _states_of(
                    optimizer, traits, group, settings, torch.empty(shape, dtype=dtype, device="meta")
                )
            except Exception as error:
                raise Raises(f"on a parameter of shape {shape} it raises {told(error)}") from error
            kept[shape] = kept_shapes(state)
            for name in kept[shape]:
                if dtypes.get(name) is not state[name].dtype:
                    raise Lacks(f"it keeps {name!r} in {state[name].dtype} for a parameter of shape {shape} alone")
        found.append(dataclasses.replace(group, kept=kept, products=products))
    return found


def _states_of(
    optimizer: Optimizer, traits: OptimizerTraits, group: GroupTraits, settings: Mapping[str, Any], like: torch.Tensor
) -> tuple[dict[str, Any], Mapping[torch.dtype, int]]:
    """What a parameter like `like` keeps behind its first step, by name, and operations of that step's matrix products; of
    tensors, shape and dtype count alone."""
    found: dict[str, Any] = {}
    counted = CountedProducts()
    with contextlib.suppress(Exception), counted:
        # Without memory: of a large parameter a first step would take seconds, and several times its bytes.
        _first_step(optimizer, traits.initial, settings, like, found)
        return found, counted.flops
    # A class that asks for a number of its parameter raises there, most often when it has made its states.
    if found and {*found} in ({*shapes, *group.scalars} for shapes in group.kept.values()):
        return found, counted.flops
    found, counted = {}, CountedProducts()
    with counted:
        _first_step(optimizer, traits.initial, settings, torch.ones_like(like, device=traits.device), found)
    return found, counted.flops


def _first_step(
    optimizer: Optimizer, initial: Initial, group: Mapping[str, Any], value: torch.Tensor, found: dict[str, Any]
) -> None:
    """Takes a first step and puts the states that it makes into `found`, also where it raises."""
    parameter = torch.nn.Parameter(value)
    parameter.grad = torch.ones_like(parameter)  # some classes make nothing of zeros
    used = clone_with(optimizer, initial, [{"params": [parameter], **own_values(group)}])
    try:
        undecorated_step(type(used))(used, closure=lambda: torch.zeros(()))
    finally:
        found.update(used.state.get(parameter, {}))


def keeps_others(traits: OptimizerTraits, whole: Whole, place: int) -> bool:
    """Whether a parameter of a trial has other states behind its first step than these traits tell."""
    specimen = whole.trial.specimens[place]
    group = traits.groups[specimen.group]
    if traits.whole:
        return kept_shapes({**whole.slots[0][place], **whole.scalars[0][place]}) != group.kept[specimen.shape]
    return {slot.name for slot in group.slots} != whole.slots[0][place].keys()


def smallest(shapes: Collection[Shape]) -> Shape:
    """Of the fewest elements."""
    return min(shapes, key=math.prod)
