"""The trial of an optimizer that is not element-wise: is its update the same one parameter after the other?

As in trial.py, a private copy runs on a few numbers as the user would run it; and as pages are updated where parameters are
whole: by a Shadow, each parameter in a call of its own, in its own shape, with states in memory that is not the class's.
Every bit is compared. `with_own_shapes` then finds which states the user's own parameters will have, of which shapes, and
what products their updates compute.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.flop_counter import flop_registry

from lightning_ptm.torch_internals import TorchDispatchMode, packet_of, tree_leaves
from lightning_ptm.update.kept import Lacks, Raises, kept_shapes, told
from lightning_ptm.update.private import PrivateOptimizer
from lightning_ptm.update.shadow import RunViews, ShadowOptimizer, own_values, undecorated_step
from lightning_ptm.update.specimens import settings_of
from lightning_ptm.update.traits import (
    GroupTraits,
    Initial,
    OptimizerTraits,
    ScalarState,
    Shape,
    StateShapes,
    same_value,
)
from lightning_ptm.update.trial import Difference, Whole, group_difference, hyper_at, run_object


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
        packet = packet_of(func)
        # Torch has formulas for `addmm`, and none for `addmm_`.
        formula = flop_registry.get(packet) or flop_registry.get(
            getattr(torch.ops.aten, packet.__name__.rstrip("_"), None)
        )
        if formula is not None:
            dtype = next(leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self.flops[dtype] += int(formula(*args, **(kwargs or {}), out_val=out))
        return out


@dataclasses.dataclass(slots=True)
class _Laid:
    """A parameter of the trial as pages hold it."""

    value: torch.Tensor
    slots: dict[str, torch.Tensor]
    scalars: ScalarState | None = None


@torch.no_grad()
def run_by_parameter(optimizer: Optimizer, traits: OptimizerTraits, whole: Whole) -> Difference | None:
    """Run a trial as whole parameters are updated in pages; what differs first from the run of all at once, or None.

    Args:
        traits: what is taken to be known about the optimizer, with the groups of the trial.
    """
    trial = whole.trial
    shadow = ShadowOptimizer(optimizer, traits)
    laid = [_lay(traits, whole, index) for index in range(len(trial.specimens))]
    advanced: list[dict[str, Any]] = [{} for _ in trial.groups]
    for step in range(len(trial.steps)):
        hyper = hyper_at(trial, step, advanced)
        for index, (specimen, each) in enumerate(zip(trial.specimens, laid, strict=True)):
            if (step, index) in trial.absent:
                continue
            gradient = whole.gradients[step][index].clone()
            run = RunViews(specimen.group, each.value, gradient, each.slots, each.scalars)
            each.scalars = shadow.step_whole(hyper, run)
        for index, each in enumerate(laid):
            found = _difference(whole, step, index, each)
            if found is not None:
                return Difference(found, step, index)
        if traits.group_slots:
            advanced = [shadow.advanced_group(hyper, index, laid[0].value) for index in range(len(trial.groups))]
        if (differs := group_difference(whole, step, advanced)) is not None:
            return differs
    return None


def _lay(traits: OptimizerTraits, whole: Whole, index: int) -> _Laid:
    specimen, start = whole.trial.specimens[index], whole.starts[index]
    group = traits.groups[specimen.group]
    dtypes = {slot.name: slot.dtype for slot in group.slots}
    # Pages of states hold anything before their first step.
    slots = {
        name: torch.full(
            shape, torch.nan if dtypes[name].is_floating_point else 77, dtype=dtypes[name], device=start.device
        )
        for name, shape in group.kept[specimen.shape].items()
    }
    return _Laid(start.reshape(specimen.shape).clone(), slots)


def _difference(whole: Whole, step: int, index: int, laid: _Laid) -> str | None:
    if not same_value(whole.values[step][index], laid.value):
        return "value"
    expected = {**whole.slots[step][index], **whole.scalars[step][index]}
    ours = {**laid.slots, **laid.scalars.values} if laid.scalars is not None else {}
    if expected.keys() != ours.keys():
        return f"set of states {sorted(expected)} (to {sorted(ours)})"
    return next((f"state {key!r}" for key, value in expected.items() if not same_value(value, ours[key])), None)


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
    private = PrivateOptimizer(optimizer)
    parameter = torch.nn.Parameter(value)
    parameter.grad = torch.ones_like(parameter)  # some classes make nothing of zeros
    used = run_object(private, initial, [{"params": [parameter], **own_values(group)}])
    try:
        undecorated_step(private.cls)(used, closure=lambda: torch.zeros(()))
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
