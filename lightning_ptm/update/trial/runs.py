"""The runs of a trial, and their comparison.

A clone of the user's optimizer is run on a few small parameters as the user would run it (`run_reference`: all groups, one
object, a closure), and as pages are updated: `run_in_pieces` (1-D pieces of parameters, of several lengths, several to a
call) or `run_by_parameter` (whole parameters, one to a call). Both of these use a Shadow, and every bit is compared.

Reads the user's optimizer and writes nothing of it. Random numbers come from generators of its own.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_ptm.terms import ALIGN_NUMEL
from lightning_ptm.update.clone import attributes_of, clone_of, constructed_clone, copy_plain, same_plain
from lightning_ptm.update.shadow import (
    GroupValues,
    RunViews,
    ScalarState,
    ShadowOptimizer,
    copy_value,
    hyperparameters_of,
    undecorated_step,
)
from lightning_ptm.update.trial.parameters import Gradient, Trial, TrialParameter
from lightning_ptm.update.trial.traits import Initial, OptimizerTraits, same_value

_CUTS = (0, 64, 448, 512, 960)
_LONG_NUMEL = 20_480
"""Length of a piece that stands for several parameters in a row; some classes keep other states from 4096 elements on."""
_LOSS = 0.75


@dataclasses.dataclass(slots=True)
class ReferenceRun:
    """Results of a run of all parameters in one object: by step, then by parameter or group."""

    trial: Trial
    starts: list[torch.Tensor] = dataclasses.field(default_factory=list)
    gradients: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    values: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    slots: list[list[dict[str, torch.Tensor]]] = dataclasses.field(default_factory=list)
    scalars: list[list[dict[str, Any]]] = dataclasses.field(default_factory=list)
    groups: list[list[dict[str, Any]]] = dataclasses.field(default_factory=list)
    closure_calls: list[int] = dataclasses.field(default_factory=list)
    """Calls of the closure, by step."""
    moved_before_closure: bool = False
    draws_random_numbers: bool = False
    writes_gradient: bool = False
    non_parameter_keys: tuple[str, ...] = ()
    slot_names: frozenset[str] = frozenset()
    """Names of states with one number for each element, as parameters of several elements show."""
    changed_attributes: tuple[str, ...] = ()
    """Attributes of the object that a step changed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """First difference between a run as pages are updated and the reference run. `parameter` is None for a group's
    value."""

    what: str
    step: int
    parameter: int | None


def run_reference(
    optimizer: Optimizer,
    trial: Trial,
    initial: Initial,
    dtype: torch.dtype,
    device: torch.device,
    *,
    replay: ReferenceRun | None = None,
    loss: float = _LOSS,
    reset_attributes: bool = False,
) -> ReferenceRun:
    """Run a trial as the user would run the optimizer.

    Args:
        replay: takes starts and gradients from there, in the shapes of this trial's parameters.
        loss: what the closure returns.
        reset_attributes: the object's own attributes are put back before every step.
    """
    found = ReferenceRun(trial)
    if replay is not None:
        found.slot_names = replay.slot_names
    for index, spec in enumerate(trial.parameters):
        found.starts.append(_start(spec, index, dtype, device) if replay is None else replay.starts[index])
    parameters = _parameters(found)
    used = clone_with(optimizer, initial, _groups(trial, parameters, 0))
    generator = torch.Generator().manual_seed(2023)
    state = _random_state()
    attributes = copy_plain(attributes_of(used))
    changed: set[str] = set()
    for step, kind in enumerate(trial.steps):
        if reset_attributes and step:
            again = clone_of(optimizer)
            again.state, again.param_groups = used.state, used.param_groups
            used = again
        gradients = []
        for index, parameter in enumerate(parameters):
            gradient = (
                _gradient(kind, parameter, index, generator)
                if replay is None
                else replay.gradients[step][index].reshape(trial.parameters[index].shape)
            )
            gradients.append(gradient)
        for group_index, group in enumerate(used.param_groups):
            group.update(trial.at_step(group_index, step))
        _take_step(used, parameters, gradients, trial, step, loss, found)
        _record(found, used, parameters, gradients)
        if not reset_attributes and step < 4:
            now = attributes_of(used)
            changed |= {key for key in now if not same_plain(now[key], attributes.get(key))}
            attributes = copy_plain(now)
    found.draws_random_numbers = not same_value(state, _random_state())
    found.non_parameter_keys = non_parameter_keys(used)
    found.changed_attributes = tuple(sorted(changed - {"defaults"}))
    return found


def holds_parameters(optimizer: Optimizer, reference: ReferenceRun, initial: Initial) -> bool:
    """Whether `step` goes on with parameters that its groups held before its closure: groups that are emptied in there come
    too late for it."""
    parameters = _parameters(reference)
    used = clone_with(optimizer, initial, _groups(reference.trial, parameters, 0))
    for group in used.param_groups:
        group.update(reference.trial.at_step(0, 1))

    def closure() -> torch.Tensor:
        for parameter, gradient in zip(parameters, reference.gradients[0], strict=True):
            parameter.grad = gradient.clone()
        for group in used.param_groups:
            group["params"] = []
        return torch.tensor(_LOSS)

    with contextlib.suppress(Exception):  # with nothing to update it may raise, behind the update
        undecorated_step(type(used))(used, closure=closure)
    pairs = zip(parameters, reference.starts, strict=True)
    return not all(same_value(parameter.detach().flatten(), start.flatten()) for parameter, start in pairs)


def _parameters(reference: ReferenceRun) -> list[torch.nn.Parameter]:
    """The parameters of a trial, as they are at its start."""
    parameters = []
    for spec, start in zip(reference.trial.parameters, reference.starts, strict=True):
        parameter = torch.nn.Parameter(start.reshape(spec.shape).clone())
        parameter.__dict__.update(spec.attributes)
        parameters.append(parameter)
    return parameters


def clone_with(optimizer: Optimizer, initial: Initial, groups: list[dict[str, Any]]) -> Optimizer:
    """A clone of an optimizer with these groups, and with the states that its constructor makes for them."""
    if initial is Initial.CONSTRUCTED:
        return constructed_clone(optimizer, groups)
    clone = clone_of(optimizer)
    clone.param_groups = groups
    return clone


def _take_step(
    used: Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[torch.Tensor],
    trial: Trial,
    step: int,
    loss: float,
    found: ReferenceRun,
) -> None:
    before = [parameter.detach().clone() for parameter in parameters]
    closure_calls = 0

    def give_gradients() -> None:
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = None if (step, index) in trial.without_gradient else gradient.clone()

    def closure() -> torch.Tensor:
        nonlocal closure_calls
        closure_calls += 1
        if not all(map(same_value, before, parameters)):
            found.moved_before_closure = True
        give_gradients()
        return torch.tensor(loss * (1 + step % 3), device=gradients[0].device)

    give_gradients()  # a class may never call its closure
    undecorated_step(type(used))(used, closure=closure)
    found.closure_calls.append(closure_calls)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if parameter.grad is not None and not same_value(parameter.grad, gradient):
            found.writes_gradient = True


def _record(
    found: ReferenceRun, used: Optimizer, parameters: Sequence[torch.nn.Parameter], gradients: list[torch.Tensor]
) -> None:
    slots, scalars = [], []
    states = [used.state.get(parameter, {}) for parameter in parameters]
    found.slot_names |= {
        key
        for parameter, state in zip(parameters, states, strict=True)
        for key, value in state.items()
        if parameter.numel() > 1 and isinstance(value, torch.Tensor) and value.numel() > 1
    }
    for parameter, state in zip(parameters, states, strict=True):
        many = {key: value for key, value in state.items() if _is_slot(key, value, parameter, found.slot_names)}
        slots.append({key: value.detach().clone() for key, value in many.items()})
        scalars.append({key: copy_value(value) for key, value in state.items() if key not in many})
    found.gradients.append(gradients)
    found.values.append([parameter.detach().clone() for parameter in parameters])
    found.slots.append(slots)
    found.scalars.append(scalars)
    found.groups.append([hyperparameters_of(group) for group in used.param_groups])


def _is_slot(key: str, value: Any, parameter: torch.Tensor, names: frozenset[str]) -> bool:
    """Whether a state is one number for each element; of a parameter with one element, its name tells."""
    return isinstance(value, torch.Tensor) and (value.numel() > 1 or (parameter.numel() == 1 and key in names))


def _groups(trial: Trial, parameters: Sequence[torch.Tensor], step: int) -> list[dict[str, Any]]:
    groups = []
    for index, values in enumerate(copy.deepcopy([dict(values) for values in trial.groups])):
        members = [p for p, spec in zip(parameters, trial.parameters, strict=True) if spec.group == index]
        groups.append({"params": members, **values, **trial.at_step(index, step)})
    return groups


def non_parameter_keys(used: Optimizer) -> tuple[str, ...]:
    """Keys of an optimizer's state that are no parameters."""
    return tuple(repr(key) for key in used.state if not isinstance(key, torch.Tensor))


def _random_state() -> list[Any]:
    # Of Python's, the position alone is compared: it tells whether anything was drawn.
    return [torch.random.get_rng_state(), hash(random.getstate())]


def _start(spec: TrialParameter, index: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1706 + index)
    value = torch.randn(spec.shape, generator=generator)
    return (value * 10.0 ** torch.empty(spec.shape).uniform_(-3, 0.3, generator=generator)).to(device, dtype)


def _gradient(kind: Gradient, parameter: torch.Tensor, index: int, generator: torch.Generator) -> torch.Tensor:
    """One step's gradient of a parameter: both signs, many magnitudes, the same on every call."""
    shape = parameter.shape
    found = torch.randn(shape, generator=generator)
    found *= 10.0 ** torch.empty(shape).uniform_(-3, 0.5, generator=generator) / 4.0 ** (index % 3)
    found[torch.rand(shape, generator=generator) < 0.05] = 0.0
    value = parameter.detach().cpu().float()
    flat = found.reshape(-1)
    if kind is Gradient.ORTHOGONAL:
        rows, along = (each.reshape(shape[0] if len(shape) > 1 else 1, -1).double() for each in (found, value))
        share = (rows * along).sum(1, keepdim=True) / (along * along).sum(1, keepdim=True).clamp(min=1e-30)
        found = (rows - share * along).float().reshape(shape)
    elif kind is Gradient.PARALLEL:
        found = value.nan_to_num() * 0.25
    elif kind is Gradient.LARGE:
        found *= 1e3
    elif kind is Gradient.TINY:
        found *= 1e-5
    elif kind is Gradient.HOLES:
        flat[flat.numel() // 3 if flat.numel() < 448 else 64 : 448] = 0.0
    elif kind is Gradient.BROKEN:
        flat[flat.numel() // 5], flat[flat.numel() // 2] = torch.inf, torch.nan
    return found.to(parameter.device, parameter.dtype)


# -- in pieces --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _PagedParameter:
    """A parameter of the trial as pages hold it: `times` copies of it in a row, cut at `cuts`."""

    index: int
    times: int
    cuts: tuple[int, ...]
    flat: torch.Tensor
    slots: dict[str, torch.Tensor]
    scalars: ScalarState | None = None

    def runs(self, group: int, gradient: torch.Tensor) -> Iterator[RunViews]:
        flat = gradient.reshape(-1).repeat(self.times)
        for begin, end in itertools.pairwise(self.cuts):
            views = {key: slot[begin:end] for key, slot in self.slots.items()}
            yield RunViews(group, self.flat[begin:end], flat[begin:end], views, self.scalars)


@torch.no_grad()
def run_in_pieces(optimizer: Optimizer, traits: OptimizerTraits, reference: ReferenceRun) -> Difference | None:
    """Run a trial as pages are updated; the first difference from the reference run, or None.

    Args:
        traits: what is taken to be known about the optimizer, with the groups of the trial.
    """
    trial = reference.trial
    shadow = ShadowOptimizer(optimizer, traits)
    paged = list(_paged_parameters(traits, reference))
    advanced: list[dict[str, Any]] = [{} for _ in trial.groups]
    for step in range(len(trial.steps)):
        hyper = hyperparameters_at(trial, step, advanced)
        present = [each for each in paged if (step, each.index) not in trial.without_gradient]
        after = [shadow.advance(hyper, trial.parameters[each.index].group, each.scalars, each.flat) for each in present]
        pieces = [
            list(each.runs(trial.parameters[each.index].group, reference.gradients[step][each.index]))
            for each in present
        ]
        for runs in itertools.zip_longest(*pieces):  # several parameters to a call, several calls to a parameter
            shadow.step(hyper, [run for run in runs if run is not None])
        for each, scalars in zip(present, after, strict=True):
            each.scalars = scalars
        if traits.group_slots:
            like = paged[0].flat
            advanced = [shadow.advanced_group(hyper, index, like) for index in range(len(trial.groups))]
        for each in paged:
            found = _first_difference(reference, step, each)
            if found is not None:
                return Difference(found, step, each.index)
        if (differs := group_difference(reference, step, advanced)) is not None:
            return differs
    return None


def hyperparameters_at(trial: Trial, step: int, advanced: Sequence[Mapping[str, Any]]) -> GroupValues:
    """Hyper-parameters of all groups at a step of a trial.

    Args:
        advanced: by group, values that earlier steps have changed.
    """
    return GroupValues(
        tuple(
            MappingProxyType({**hyperparameters_of(values), **trial.at_step(index, step), **advanced[index]})
            for index, values in enumerate(trial.groups)
        )
    )


def group_difference(reference: ReferenceRun, step: int, advanced: Sequence[Mapping[str, Any]]) -> Difference | None:
    """The first value of a group that a step has changed to another one than in the reference run."""
    for index, values in enumerate(advanced):
        for key, value in values.items():
            if not same_value(reference.groups[step][index].get(key), value):
                return Difference(f"group value {key!r}", step, None)
    return None


def _paged_parameters(traits: OptimizerTraits, reference: ReferenceRun) -> Iterator[_PagedParameter]:
    long_in: set[int] = set()
    for index, (spec, start) in enumerate(zip(reference.trial.parameters, reference.starts, strict=True)):
        ways = [1]
        if spec.numel % ALIGN_NUMEL == 0 and spec.group not in long_in:
            long_in.add(spec.group)
            ways.append(-(-_LONG_NUMEL // spec.numel))
        for times in ways:
            numel = spec.numel * times
            cuts = (*(cut for cut in _CUTS if cut < numel), numel) if times == 1 else (0, numel)
            # Pages of states hold anything before their first step.
            slots = {
                slot.name: torch.full(
                    (numel,), torch.nan if slot.dtype.is_floating_point else 77, dtype=slot.dtype, device=start.device
                )
                for slot in traits.groups[spec.group].slots
            }
            yield _PagedParameter(index, times, cuts, start.reshape(-1).repeat(times), slots)


def _first_difference(reference: ReferenceRun, step: int, paged: _PagedParameter) -> str | None:
    if not same_value(reference.values[step][paged.index].reshape(-1).repeat(paged.times), paged.flat):
        return "value"
    for key, value in reference.slots[step][paged.index].items():
        if key not in paged.slots or not same_value(value.reshape(-1).repeat(paged.times), paged.slots[key]):
            return f"state {key!r}"
    expected = reference.scalars[step][paged.index]
    ours = paged.scalars.values if paged.scalars is not None else {}
    if expected.keys() != ours.keys():
        return f"set of scalars {sorted(expected)} (to {sorted(ours)})"
    for key, value in expected.items():
        if not same_value(value, ours[key]):
            return f"scalar {key!r}"
    return None


# -- parameter by parameter ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _WholeParameter:
    """A parameter of the trial as pages hold it where it is updated whole."""

    value: torch.Tensor
    slots: dict[str, torch.Tensor]
    scalars: ScalarState | None = None


@torch.no_grad()
def run_by_parameter(optimizer: Optimizer, traits: OptimizerTraits, reference: ReferenceRun) -> Difference | None:
    """Run a trial as whole parameters are updated in pages; the first difference from the reference run, or None.

    Args:
        traits: what is taken to be known about the optimizer, with the groups of the trial.
    """
    trial = reference.trial
    shadow = ShadowOptimizer(optimizer, traits)
    parameters = [_whole_parameter(traits, reference, index) for index in range(len(trial.parameters))]
    advanced: list[dict[str, Any]] = [{} for _ in trial.groups]
    for step in range(len(trial.steps)):
        hyper = hyperparameters_at(trial, step, advanced)
        for index, (spec, each) in enumerate(zip(trial.parameters, parameters, strict=True)):
            if (step, index) in trial.without_gradient:
                continue
            gradient = reference.gradients[step][index].clone()
            run = RunViews(spec.group, each.value, gradient, each.slots, each.scalars)
            each.scalars = shadow.step_whole(hyper, run)
        for index, each in enumerate(parameters):
            found = _difference(reference, step, index, each)
            if found is not None:
                return Difference(found, step, index)
        if traits.group_slots:
            advanced = [shadow.advanced_group(hyper, index, parameters[0].value) for index in range(len(trial.groups))]
        if (differs := group_difference(reference, step, advanced)) is not None:
            return differs
    return None


def _whole_parameter(traits: OptimizerTraits, reference: ReferenceRun, index: int) -> _WholeParameter:
    spec, start = reference.trial.parameters[index], reference.starts[index]
    group = traits.groups[spec.group]
    dtypes = {slot.name: slot.dtype for slot in group.slots}
    # Pages of states hold anything before their first step.
    slots = {
        name: torch.full(
            shape, torch.nan if dtypes[name].is_floating_point else 77, dtype=dtypes[name], device=start.device
        )
        for name, shape in group.state_shapes[spec.shape].items()
    }
    return _WholeParameter(start.reshape(spec.shape).clone(), slots)


def _difference(reference: ReferenceRun, step: int, index: int, parameter: _WholeParameter) -> str | None:
    if not same_value(reference.values[step][index], parameter.value):
        return "value"
    expected = {**reference.slots[step][index], **reference.scalars[step][index]}
    ours = {**parameter.slots, **parameter.scalars.values} if parameter.scalars is not None else {}
    if expected.keys() != ours.keys():
        return f"set of states {sorted(expected)} (to {sorted(ours)})"
    return next((f"state {key!r}" for key, value in expected.items() if not same_value(value, ours[key])), None)


# -- comparison -------------------------------------------------------------------------------------------------------


def replay_of(reference: ReferenceRun, places: Sequence[int]) -> ReferenceRun:
    """Starts and gradients of some of the parameters, for a run of these alone."""
    starts = [reference.starts[place] for place in places]
    gradients = [[gradients[place] for place in places] for gradients in reference.gradients]
    return ReferenceRun(reference.trial, starts, gradients, slot_names=reference.slot_names)


def same_values_at(reference: ReferenceRun, places: Sequence[int], part: ReferenceRun) -> bool:
    """Whether parameters moved as in a run of them alone."""
    for values, ours in zip(reference.values, part.values, strict=True):
        if not all(same_value(values[place], mine) for place, mine in zip(places, ours, strict=True)):
            return False
    return True


def same_values(first: ReferenceRun, second: ReferenceRun) -> bool:
    """Whether two runs over the same numbers, in whatever shapes, moved parameters and states alike."""
    for step in range(len(first.values)):
        for one, other in zip(first.values[step], second.values[step], strict=True):
            if not same_value(one.reshape(-1), other.reshape(-1)):
                return False
        for ours, theirs in zip(first.slots[step], second.slots[step], strict=True):
            if not same_value(_flat(ours), _flat(theirs)):
                return False
    return True


def _flat(slots: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value.reshape(-1) for key, value in slots.items()}


def agree_within_rounding(fused: ReferenceRun, other: ReferenceRun) -> bool:
    """Whether two runs agree but for rounding; values that overflowed in `other` are not compared."""
    pairs = [
        pair for ours, theirs in zip(fused.values, other.values, strict=True) for pair in zip(ours, theirs, strict=True)
    ]
    for ours_, theirs_ in zip(fused.slots, other.slots, strict=True):
        for mine, yours in zip(ours_, theirs_, strict=True):
            pairs.extend((value, yours[key]) for key, value in mine.items() if key in yours)
    for ours__, theirs__ in pairs:
        known = theirs__.isfinite()
        a, b = ours__[known].double(), theirs__[known].double()
        if b.numel() and not torch.allclose(a, b, rtol=0.1, atol=0.02 * float(b.abs().max())):
            return False
    return True
