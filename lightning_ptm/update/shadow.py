"""The shadow: a clone of the user's optimizer, which updates views of pages.

Owns the clone (clone.py). Knows views and scalars; never pages, flats, chunks or threads.
I1: the user's optimizer and its groups are only read, and its `state` stays empty; what changes is in the views and in
    ScalarState.
I2: hyper-parameters are a snapshot: a scheduler that writes `param_groups` after the snapshot changes nothing here.
I3: between two calls of `step` the clone refers to no view, so pages can be released.
I4: each step begins with the attributes and group lists that the user's object had at the start: nothing passes from one page
    to the next there. (The trial refuses a class whose update depends on that.)
I5: a step runs outside of the autocast, the dispatch modes and the default dtype of its thread: a thread of its own, or a
    forward that waits for the update, under mixed precision or trainer/matmul_precision.py. Tiers and time decide which, and
    bits must not depend on that.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptm.errors import ConfigError, InternalError, UsageError
from lightning_ptm.torch_internals import number_of_modes, without_modes
from lightning_ptm.update.clone import clone_of, constructed_clone, copy_plain
from lightning_ptm.update.default_dtype import DefaultDtype
from lightning_ptm.update.trial.traits import Initial, OptimizerTraits, Shape, same_value

_MAX_CHECKED_NUMEL = 1 << 20
"""The largest parameter on which `check` tries a step."""

NOT_HYPERPARAMETERS = frozenset(("params", "param_names"))
"""Keys of a parameter group that are no hyper-parameters."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ScalarState:
    """The scalars of one parameter after some step. Shared by every parameter with the same history: never written to.

    Equality is identity, so that grouping parameters into runs costs nothing; `same_as` compares values.
    """

    values: Mapping[str, Any]

    def same_as(self, other: ScalarState) -> bool:
        """True when both hold the same names with the same values, types and dtypes."""
        return self.values.keys() == other.values.keys() and all(
            same_value(value, other.values[name]) for name, value in self.values.items()
        )


def frozen_scalars(values: Mapping[str, Any]) -> ScalarState:
    """A ScalarState of private copies of `values`."""
    return ScalarState(MappingProxyType({name: copy_value(value) for name, value in values.items()}))


def copy_value(value: Any) -> Any:
    """A copy that shares no tensor memory with `value`; values that are no tensors are taken to be immutable."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


@dataclasses.dataclass(frozen=True, slots=True)
class GroupValues:
    """The values of an optimizer's `param_groups` at one step, without the parameters (tensors copied).

    Attributes:
        number: of the step, by which encoded states are rounded (state_encoding.py).
    """

    groups: tuple[Mapping[str, Any], ...]
    number: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _ScalarStep:
    """The scalars of parameters before and after one step."""

    hyper: GroupValues
    group: int
    dtype: torch.dtype
    device: torch.device
    """Device of the parameters that are updated: fused classes keep their number of steps there."""
    before: ScalarState | None
    after: ScalarState | None

    def is_of(self, group: int, scalars: ScalarState | None, like: torch.Tensor) -> bool:
        if (group, like.dtype, like.device) != (self.group, self.dtype, self.device):
            return False
        if scalars is None or self.before is None:
            return scalars is self.before
        return scalars is self.before or scalars.same_as(self.before)


@dataclasses.dataclass(frozen=True, slots=True)
class RunViews:
    """Views of a run of elements, which the optimizer updates as if they were a parameter: 1-D tensors of equal shape, or a
    whole parameter in its own shape, with its slots in theirs.

    `scalars` is None for parameters that were never updated: the slots then hold no state yet and are filled.
    """

    group: int
    parameter: torch.Tensor
    gradient: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    scalars: ScalarState | None


def snapshot(optimizer: Optimizer, traits: OptimizerTraits, number: int = 0) -> GroupValues:
    """Copy the hyper-parameters for one step, as the user's object has them now.

    Args:
        number: of the step; see GroupValues.

    Group values that the class itself advances (`traits.group_slots`) are advanced in the user's object, as its own
    `step` would have done; the snapshot holds them as they were before.

    Raises:
        ConfigError: the optimizer has another number of parameter groups than when it was probed.
    """
    if len(optimizer.param_groups) != len(traits.groups):
        raise ConfigError(
            f"{traits.name} has {len(optimizer.param_groups)} parameter groups and had {len(traits.groups)} when "
            "its pages were laid out; the change was made within a step, when pages cannot be laid out again; "
            "add and remove groups between batches (on_train_epoch_start, on_train_batch_start)"
        )
    groups = []
    for group, known in zip(optimizer.param_groups, traits.groups, strict=True):
        values = hyperparameters_of(group)
        for key, reason in known.must_stay_zero.items():
            if values.get(key):
                raise UsageError(
                    f"{key} of {traits.name} was 0 when training began and is {values[key]} now. With it, {reason}; so its "
                    f"update cannot be run page by page. Leave {key} at 0, or use another optimizer"
                )
        if known.fused and values.get("fused") is None:
            values["fused"] = True
        groups.append(MappingProxyType(values))
    hyper = GroupValues(tuple(groups), number)
    if traits.group_slots:
        shadow = ShadowOptimizer(optimizer, traits)
        like = torch.empty(0, device=traits.device)
        for index, group in enumerate(optimizer.param_groups):
            group.update(shadow.advanced_group(hyper, index, like))
    return hyper


def hyperparameters_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a parameter group's hyper-parameters that shares nothing that could be written to."""
    values = {key: value for key, value in group.items() if key not in NOT_HYPERPARAMETERS}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            values[key] = copy_value(value)
        elif isinstance(value, list | dict | set):
            values[key] = copy.deepcopy(value)
    return values


class ShadowOptimizer:
    """Runs the update of one optimizer over views. Not thread-safe: one thread at a time.

    Args:
        optimizer: the user's object; read here once and not kept.
        traits: its traits, found by the probe.
        default_dtype: torch's, in a step, where forwards that are under way may have another (I5); None: they do not.
    """

    def __init__(
        self, optimizer: Optimizer, traits: OptimizerTraits, *, default_dtype: torch.dtype | None = None
    ) -> None:
        self.traits = traits
        self._default_dtype = default_dtype
        self._clone = clone_of(optimizer)
        self._step = undecorated_step(type(optimizer))
        self._closure = {"closure": _nan_loss} if traits.closure else {}
        # I4
        self._initial_attributes = copy_plain({name: vars(self._clone).get(name) for name in traits.changed_attributes})
        self._scalar_steps: list[_ScalarStep] = []
        """Results of `advance` in the newest step, one per group, scalars and dtype."""

    def step(self, hyper: GroupValues, runs: Sequence[RunViews]) -> None:
        """Update every run's parameter and slots in place, as one step of the optimizer; call it under no_grad.

        Scalars are not advanced here (one parameter has many runs): see `advance`.

        Raises:
            UsageError: a run that has no slots for a state that the optimizer now keeps (a hyper-parameter was
                switched on after the probe, e.g. SGD's momentum from 0).
        """
        # torch's fused SGD takes the first of a call's parameters to speak for all: first steps go in a call of their own.
        if self.traits.whole:
            raise InternalError(f"{self.traits.name} updates whole parameters, one by one (`step_whole`)")
        first = [run for run in runs if run.scalars is None]
        if first and len(first) < len(runs):
            self._step_over(hyper, first)
            self._step_over(hyper, [run for run in runs if run.scalars is not None])
        else:
            self._step_over(hyper, runs)

    def step_whole(self, hyper: GroupValues, run: RunViews) -> ScalarState | None:
        """Update a whole parameter and its slots in place; call it under no_grad.

        Returns:
            Its scalars after the step; None where it still has no state at all.

        Raises:
            UsageError: as `step`; or a state has another shape than its slot.
        """
        (state,) = self._step_over(hyper, [run])
        return _scalars_of(state, run.slots)

    def advance(
        self, hyper: GroupValues, group: int, scalars: ScalarState | None, like: torch.Tensor
    ) -> ScalarState | None:
        """Find the scalars of a parameter after one step, by a step on a few zeros (I2 of traits.py); None where it still has
        no state at all.

        Args:
            hyper: the step's hyper-parameters.
            group: the parameter's group.
            scalars: its scalars before the step, None before its first.
            like: any tensor of the dtype and device that the parameter is updated in.
        """
        if self._scalar_steps and self._scalar_steps[0].hyper is not hyper:
            self._scalar_steps = []
        known = next((each for each in self._scalar_steps if each.is_of(group, scalars, like)), None)
        if known is None:  # all flats of an optimizer are asked about in each of its steps
            after = _scalars_of(self._try_on_zeros(hyper, group, scalars, like), self._slot_shapes(group, None))
            known = _ScalarStep(hyper, group, like.dtype, like.device, scalars, after)
            self._scalar_steps.append(known)
        return known.after

    def advanced_group(self, hyper: GroupValues, group: int, like: torch.Tensor) -> dict[str, Any]:
        """Find the values of a group that steps advance (`traits.group_slots`), after one step."""
        created, after = self.traits.created, dict[str, Any]()
        scalars: ScalarState | None = None
        if created and created <= hyper.groups[group].keys():
            # A class that makes such a key in its first step makes the parameters' state there, and expects it later.
            groups = [{key: value for key, value in each.items() if key not in created} for each in hyper.groups]
            scalars = self.advance(GroupValues(tuple(groups)), group, None, like)
        self._try_on_zeros(hyper, group, scalars, like, keep=after)
        return {key: copy_value(after[key]) for key in self.traits.group_slots if key in after}

    def check(
        self, hyper: GroupValues, group: int, scalars: ScalarState | None, slots: Collection[str], like: torch.Tensor
    ) -> None:
        """Try a step on a few zeros, or on zeros of the shape of the group's smallest whole parameter, so that errors of the
        class with these hyper-parameters, and states that pages do not hold, are found before a parameter changes.

        Args:
            hyper, group, scalars, like: as `advance`.
            slots: names of the slots that the parameter with these scalars has. Where a class keeps a state whose size
                depends on the parameter, it is a scalar of small parameters and a slot of large ones.

        Raises:
            UsageError: as `step`; and whatever the class raises.
        """
        shape = self.traits.groups[group].example_shape
        if self.traits.whole:
            kept = self.traits.groups[group].state_shapes.items()
            shapes = [each for each, its in kept if its.keys() == set(slots) and math.prod(each) <= _MAX_CHECKED_NUMEL]
            if not shapes:
                return
            shape = min(shapes, key=math.prod)
        self._try_on_zeros(hyper, group, scalars, like, shape, check=True)

    @torch.no_grad()
    def _try_on_zeros(
        self,
        hyper: GroupValues,
        group: int,
        scalars: ScalarState | None,
        like: torch.Tensor,
        shape: Shape | None = None,
        keep: dict[str, Any] | None = None,
        *,
        check: bool = False,
    ) -> dict[str, Any]:
        shape = self.traits.groups[group].example_shape if shape is None else shape
        zeros = torch.zeros(shape, dtype=like.dtype, device=like.device)
        clone = self._clone
        run = RunViews(group, zeros, torch.zeros_like(zeros), self._dummy_slots(group, like, shape), scalars)
        zeros.grad = run.gradient
        try:
            clone.state[zeros] = self._state(hyper, run)
            clone.param_groups = [{"params": [zeros], **self._group_values(hyper, group)}]
            self._take_step()
            # With gradients of zeros some classes make only a part of their first state.
            if check and (scalars is not None or all(clone.state[zeros].get(name) is not None for name in run.slots)):
                self._copy_states_to_slots(run)
            if keep is not None:
                keep.update(clone.param_groups[0])
            return dict(clone.state[zeros])
        finally:
            clone.param_groups = []
            clone.state.clear()

    def _dummy_slots(self, group: int, like: torch.Tensor, shape: Shape | None = None) -> dict[str, torch.Tensor]:
        shapes = self._slot_shapes(group, shape)
        dtypes = {slot.name: slot.dtype for slot in self.traits.groups[group].slots}
        return {name: torch.zeros(shape, dtype=dtypes[name], device=like.device) for name, shape in shapes.items()}

    def _slot_shapes(self, group: int, shape: Shape | None) -> Mapping[str, Shape]:
        """Returns the shapes of the slots of a parameter of `shape` by name (None: the group's example)."""
        traits = self.traits.groups[group]
        example_shape = traits.example_shape if shape is None else shape
        if self.traits.whole:
            return traits.state_shapes[example_shape]
        return {slot.name: example_shape for slot in traits.slots}

    def _group_values(self, hyper: GroupValues, group: int) -> dict[str, Any]:
        values = dict(hyper.groups[group])
        for key in self.traits.group_containers:
            if key in values:
                values[key] = copy.deepcopy(values[key])  # I4
        return values

    def _take_step(self) -> None:
        if self._initial_attributes:
            vars(self._clone).update(copy_plain(self._initial_attributes))
        with nullcontext() if self._default_dtype is None else DefaultDtype(self._default_dtype):
            self._take_step_outside_modes()

    def _take_step_outside_modes(self) -> None:
        if number_of_modes() or torch.is_autocast_enabled(self.traits.device.type):  # I5
            with without_modes(), torch.autocast(self.traits.device.type, enabled=False):
                self._step(self._clone, **self._closure)
        else:
            self._step(self._clone, **self._closure)

    def _step_over(self, hyper: GroupValues, runs: Sequence[RunViews]) -> list[dict[str, Any]]:
        """One call of the optimizer's step over some runs; the state of each run after it."""
        clone = self._clone
        groups: dict[int, dict[str, Any]] = {}
        data = [run.parameter.detach() for run in runs]
        try:
            for run in runs:
                run.parameter.grad = run.gradient
                clone.state[run.parameter] = self._state(hyper, run)
                group = groups.get(run.group)
                if group is None:
                    groups[run.group] = {"params": [run.parameter], **self._group_values(hyper, run.group)}
                else:
                    group["params"].append(run.parameter)
            clone.param_groups = list(groups.values())
            self._take_step()
            for run, own in zip(runs, data, strict=True):
                self._copy_states_to_slots(run)
                if run.parameter.data_ptr() != own.data_ptr():  # the class has given the parameter another tensor
                    own.copy_(run.parameter)
                    run.parameter.data = own
            return [clone.state[run.parameter] for run in runs]
        finally:
            clone.param_groups = []
            clone.state.clear()
            for run in runs:
                run.parameter.grad = None

    def _state(self, hyper: GroupValues, run: RunViews) -> dict[str, Any]:
        if run.scalars is not None:
            state = {name: copy_value(value) for name, value in run.scalars.values.items()}
            state.update(run.slots)
            return state
        if self.traits.initial is Initial.LAZY:
            return {}
        fresh = constructed_clone(self._clone, [{"params": [run.parameter], **self._group_values(hyper, run.group)}])
        return dict(fresh.state[run.parameter])

    def _copy_states_to_slots(self, run: RunViews) -> None:
        """Copy states that the optimizer made or replaced, instead of writing in place, into their slots."""
        state = self._clone.state[run.parameter]
        missing = [name for name in run.slots if state.get(name) is None]
        if missing and (state or run.scalars is not None):
            raise UsageError(
                f"{self.traits.name} has no {', '.join(map(repr, missing))} after a step for a parameter of shape "
                f"{tuple(run.parameter.shape)}: it creates states in some steps only, and pages for them are "
                "allocated before the first. Use an optimizer that creates its states in its first step"
            )
        for name, value in state.items():
            slot = run.slots.get(name)
            if slot is not None:
                if value is not slot and value is not None:
                    if self.traits.whole and value.shape != slot.shape:
                        raise UsageError(
                            f"{self.traits.name} now keeps {name!r} of shape {tuple(value.shape)} for a parameter of shape "
                            f"{tuple(run.parameter.shape)}, and its pages hold {tuple(slot.shape)}: a hyper-parameter "
                            f"changed after training began. Give the optimizer this setting from the start"
                        )
                    slot.copy_(value)
            elif _is_slot(value):
                raise UsageError(
                    f"{self.traits.name} now keeps {name!r}, for which no pages were taken: a hyper-parameter was "
                    "switched on after training began. Give the optimizer this setting from the start (e.g. a tiny momentum)"
                )


def _scalars_of(state: Mapping[str, Any], slots: Mapping[str, Any]) -> ScalarState | None:
    """Returns the optimizer's scalar states of a parameter (such as `step`) after a step.

    Returns None if the optimizer keeps state tensors for the parameter but has not created any state yet (momentum 0 so
    far, a class that skips all-zero gradients). Its next step then counts as its first.
    """
    if slots and not state:
        return None
    return frozen_scalars({name: value for name, value in state.items() if name not in slots})


def _is_slot(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _nan_loss() -> torch.Tensor:
    """A closure for a class that requires one: gradients are computed already, and the loss is not known any more."""
    return torch.tensor(torch.nan)


def undecorated_step(cls: type[Optimizer]) -> Callable[..., Any]:
    """The class's `step` without torch's wrapper, which takes 7 us and would run global hooks once per page."""
    step: Callable[..., Any] = cls.step
    if getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step
