"""The shadow: an instance of the user's own optimizer class that is run over views of pages (design.md section 7).

Owns one clone of the user's optimizer, made without calling its constructor. Knows views and scalars; never pages,
flats, chunks or threads.
I1: the user's optimizer object is only read, and its `state` stays empty; what changes is in the views and in ScalarState.
I2: hyper-parameters are a snapshot: a scheduler that writes `param_groups` after the snapshot changes nothing here.
I3: between two calls of `step` the clone names no view, so pages can be released.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.update.traits import Initial, OptimizerTraits, ScalarState, copy_value, frozen_scalars

_DUMMY_NUMEL = 64
_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
# Schedulers and Lightning wrap these on the instance; the wrappers point back at the user's object.
_NOT_CLONED = frozenset((*_HOOKS, "state", "param_groups", "step", "zero_grad", "_step_count", "_opt_called"))


@dataclasses.dataclass(frozen=True, slots=True)
class HyperParameters:
    """The values of an optimizer's `param_groups` at one step, without the parameters (tensors copied)."""

    groups: tuple[Mapping[str, Any], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RunViews:
    """One run handed to the optimizer as if it were a parameter; all tensors are 1-D and of equal shape.

    `scalars` is None for parameters that were never updated: the slots then hold no state yet and are filled.
    """

    group: int
    parameter: torch.Tensor
    gradient: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    scalars: ScalarState | None


def snapshot(optimizer: Optimizer, traits: OptimizerTraits) -> HyperParameters:
    """Copy the hyper-parameters for one step, as the user's object has them now.

    Group values that the class itself advances (`traits.group_slots`) are advanced in the user's object, as its own
    `step` would have done; the snapshot holds them as they were before.

    Raises:
        ConfigError: the optimizer has another number of parameter groups than when it was probed.
    """
    if len(optimizer.param_groups) != len(traits.groups):
        raise ConfigError(
            f"{traits.name} has {len(optimizer.param_groups)} parameter groups, {len(traits.groups)} when its pages were "
            "laid out; the new group has no pages. Add parameter groups before the fit starts, or restart the fit"
        )
    groups = []
    for group, known in zip(optimizer.param_groups, traits.groups, strict=True):
        values = {key: _copy_hyper(value) for key, value in group.items() if key != "params"}
        if known.fused and values.get("fused") is None:
            values["fused"] = True
        groups.append(MappingProxyType(values))
    hyper = HyperParameters(tuple(groups))
    if traits.group_slots:
        shadow = Shadow(optimizer, traits)
        like = torch.empty(0, device=traits.device)
        for index, group in enumerate(optimizer.param_groups):
            group.update(shadow.advanced_group(hyper, index, traits.group_slots, like))
    return hyper


def _copy_hyper(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return copy_value(value)
    if isinstance(value, list | dict | set):
        return copy.deepcopy(value)
    return value


class Shadow:
    """Runs the update of one optimizer over views. Not thread-safe: one thread at a time.

    Args:
        optimizer: the user's object; read here once and not kept.
        traits: what the probe found about it.
    """

    def __init__(self, optimizer: Optimizer, traits: OptimizerTraits) -> None:
        self.traits = traits
        self._construct = _constructor(optimizer)
        self._step = _undecorated_step(type(optimizer))

        self._clone = _clone(optimizer)

    def step(self, hyper: HyperParameters, runs: Sequence[RunViews]) -> None:
        """Update every run's parameter and slots in place, as one step of the optimizer; call it under no_grad.

        Scalars are not advanced here (one parameter has many runs): see `advance`.

        Raises:
            UsageError: a run that has no slots for a state that the optimizer now keeps (a hyper-parameter was
                switched on after the probe, e.g. SGD's momentum from 0).
        """
        # torch's fused SGD takes the first of a call's parameters to speak for all: first steps go in a call of their own.
        first = [run for run in runs if run.scalars is None]
        if first and len(first) < len(runs):
            self._call(hyper, first)
            self._call(hyper, [run for run in runs if run.scalars is not None])
        else:
            self._call(hyper, runs)

    def advance(
        self, hyper: HyperParameters, group: int, scalars: ScalarState | None, like: torch.Tensor
    ) -> ScalarState:
        """The scalars of a parameter after one step, found on a few zeros (invariant I2 of traits.py).

        Args:
            hyper: the step's hyper-parameters.
            group: the parameter's group.
            scalars: its scalars before the step, None before its first.
            like: any tensor of the dtype and device that the parameter is updated in.
        """
        slots = {slot.name for slot in self.traits.groups[group].slots}
        return frozen_scalars(
            {
                name: value
                for name, value in self._try_on_zeros(hyper, group, scalars, like).items()
                if name not in slots
            }
        )

    def advanced_group(
        self, hyper: HyperParameters, group: int, keys: Sequence[str], like: torch.Tensor
    ) -> dict[str, Any]:
        """The values under `keys` of a parameter group after one step."""
        after: dict[str, Any] = {}
        self._try_on_zeros(hyper, group, None, like, keep=after)
        return {key: copy_value(after[key]) for key in keys if key in after}

    @torch.no_grad()
    def _try_on_zeros(
        self,
        hyper: HyperParameters,
        group: int,
        scalars: ScalarState | None,
        like: torch.Tensor,
        keep: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        zeros = torch.zeros(_DUMMY_NUMEL, dtype=like.dtype, device=like.device)
        clone = self._clone
        slots = {
            slot.name: torch.zeros(_DUMMY_NUMEL, dtype=slot.dtype, device=like.device)
            for slot in self.traits.groups[group].slots
        }
        run = RunViews(group, zeros, torch.zeros_like(zeros), slots, scalars)
        zeros.grad = run.gradient
        try:
            clone.state[zeros] = self._state(hyper, run)
            clone.param_groups = [{"params": [zeros], **hyper.groups[group]}]
            self._step(clone)
            if keep is not None:
                keep.update(clone.param_groups[0])
            return dict(clone.state[zeros])
        finally:
            clone.param_groups = []
            clone.state.clear()

    def _call(self, hyper: HyperParameters, runs: Sequence[RunViews]) -> None:
        clone = self._clone
        groups: dict[int, dict[str, Any]] = {}
        try:
            for run in runs:
                run.parameter.grad = run.gradient
                clone.state[run.parameter] = self._state(hyper, run)
                group = groups.get(run.group)
                if group is None:
                    groups[run.group] = {"params": [run.parameter], **hyper.groups[run.group]}
                else:
                    group["params"].append(run.parameter)
            clone.param_groups = list(groups.values())
            self._step(clone)
            for run in runs:
                self._collect(run)
        finally:
            clone.param_groups = []
            clone.state.clear()
            for run in runs:
                run.parameter.grad = None

    def _state(self, hyper: HyperParameters, run: RunViews) -> dict[str, Any]:
        if run.scalars is not None:
            state = {name: copy_value(value) for name, value in run.scalars.values.items()}
            state.update(run.slots)
            return state
        if self.traits.initial is Initial.LAZY:
            return {}
        fresh = self._construct([{"params": [run.parameter], **hyper.groups[run.group]}])
        return dict(fresh.state[run.parameter])

    def _collect(self, run: RunViews) -> None:
        """Bring slots home that the optimizer replaced, or made, instead of writing in place."""
        for name, value in self._clone.state[run.parameter].items():
            slot = run.slots.get(name)
            if slot is not None:
                if value is not slot and value is not None:
                    slot.copy_(value)
            elif _is_slot(value):
                raise UsageError(
                    f"{self.traits.name} now keeps {name!r}, for which no pages were taken: a hyper-parameter was "
                    "switched on after training began. Give the optimizer this setting from the start (e.g. a tiny momentum)"
                )


def _is_slot(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _undecorated_step(cls: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's `step` without torch's profiling wrapper: 7 us a call, and global hooks would run once per page."""
    step: Callable[..., Any] = cls.step
    if getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def construct_like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """A new instance of the user's class over `groups`, with its own defaults (those its constructor takes)."""
    return _constructor(optimizer)(groups)


def _constructor(optimizer: Optimizer) -> Callable[[list[dict[str, Any]]], Optimizer]:
    cls = type(optimizer)
    accepted = inspect.signature(cls.__init__).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    defaults = {key: value for key, value in optimizer.defaults.items() if anything or key in accepted}

    def construct(groups: list[dict[str, Any]]) -> Optimizer:
        return cls(groups, **defaults)

    return construct


def _own(value: Any) -> Any:
    """What the clone may change on its own; all else (modules, handles of C extensions) is shared, never copied."""
    if isinstance(value, torch.Tensor):
        return copy_value(value) if value.numel() <= _DUMMY_NUMEL else value
    return copy.copy(value) if isinstance(value, dict | list | set) else value


def _clone(optimizer: Optimizer) -> Optimizer:
    """An instance with the user's attributes, no parameters, no state and no hooks."""
    clone = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        if name in _NOT_CLONED:
            continue
        clone.__dict__[name] = _own(value)
    for name in _HOOKS:
        clone.__dict__[name] = OrderedDict()
    clone.state = defaultdict(dict)
    clone.param_groups = []
    return clone
